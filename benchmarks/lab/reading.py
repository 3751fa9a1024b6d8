"""Prefills samples one after another with a method, then decodes their answers as one batch.

Suffixes are those of `benchmarks.reader`. B is the number of samples in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from deltafront.benchmarks.lab.samples import Decode, Sample
from deltafront.benchmarks.reader import Reader, Reading
from deltafront.workers.model.decoder.stack import LayerStack


@dataclass(frozen=True)
class Case:
    """A method with options. blocks: Number of blocks to recompute before the prompt's end is prefilled
    again. 0: keep the end as the method computed it."""

    method: str
    blocks: int = 0

    @classmethod
    def parse(cls, given: str) -> Case:
        """Parse `METHOD[:OPTIONS][@BLOCKS]`. Raises ValueError."""
        method, _, blocks = given.partition("@")
        if blocks and not blocks.isdecimal():
            raise ValueError(f"no case {given!r}: METHOD, METHOD:OPTION=NUMBER,… or METHOD:…@BLOCKS")
        return cls(method, int(blocks or 0))

    def __str__(self) -> str:
        return f"{self.method}@{self.blocks}" if self.blocks else self.method


TOLD = 24
"""Number of first tokens of dense attention's answer whose log-probability is measured."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and the probability of dense attention's answer.

    Attributes:
        ids, said: Tokens and text of the greedy answer.
        density, prefill: Share of causal tiles that were computed. `prefill` leaves out the tiles for
            recomputed blocks and the prompt's end.
        seconds: Wall-clock time of prefill.
        logp: Mean log-probability of the first `TOLD` tokens of dense attention's answer, teacher-forced.
        agreement: Share of these tokens that have the highest probability.
    """

    ids: tuple[int, ...]
    said: str
    density: float
    prefill: float
    seconds: float
    logp: float
    agreement: float


class Together:
    """The KV cache of a batch of `places` samples, each with at most `room` tokens including its answer."""

    def __init__(self, stack: LayerStack, places: int, room: int) -> None:
        config = stack.config
        shape = (config.layers, places, config.kv_heads, room, config.head_dim)
        self._stack = stack
        self._k_LBGSD = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self._v_LBGSD = torch.zeros_like(self._k_LBGSD)
        self._readers = [
            Reader(stack, room, kv=(self._k_LBGSD[:, place : place + 1], self._v_LBGSD[:, place : place + 1]))
            for place in range(places)
        ]

    @torch.inference_mode()
    def answers(
        self,
        method: str,
        blocks: Sequence[int],
        samples: Sequence[Sample],
        chunk: int,
        tokens: int,
        decode: Decode,
        told: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Answer]]:
        """Prefill each sample once. For each number of blocks, answer each sample with at most `tokens`
        tokens.

        Args:
            blocks: Numbers of blocks to recompute, ascending.
            samples: At most `places` samples.
            told: The tokens of dense attention's answers. None: this case is dense.
        """
        read = [
            self._timed(partial(reader.read, sample.ids, method, chunk))
            for reader, sample in zip(self._readers, samples, strict=False)
        ]
        made = []
        for count in blocks:
            with ExitStack() as again:
                ends = read
                if count and method != "dense":
                    ends = [
                        self._again(again, reader, count, *one)
                        for reader, one in zip(self._readers, read, strict=False)
                    ]
                made.append(
                    self._answered(
                        ends, [reading.density for reading, _ in read], samples, tokens, decode, told
                    )
                )
        return made

    def _timed(self, read: Callable[[], Reading]) -> tuple[Reading, float]:
        self._wait()
        begun = time.monotonic()
        reading = read()
        self._wait()
        return reading, time.monotonic() - begun

    def _again(
        self, until: ExitStack, reader: Reader, blocks: int, reading: Reading, seconds: float
    ) -> tuple[Reading, float]:
        again, more = self._timed(lambda: until.enter_context(reader.end_again(reading, blocks)))
        return again, seconds + more

    def _answered(
        self,
        read: Sequence[tuple[Reading, float]],
        prefill_B: Sequence[float],
        samples: Sequence[Sample],
        tokens: int,
        decode: Decode,
        told: Sequence[Sequence[int]] | None,
    ) -> list[Answer]:
        first_BC = torch.cat([reading.tail_TC for reading, _ in read])
        lengths = [len(sample.ids) for sample in samples]
        ids_B = self._decode(first_BC, lengths, tokens, decode, samples)
        known_B = [ids[:TOLD] for ids in (ids_B if told is None else told)]
        likely_B = self._likely(first_BC, lengths, known_B)
        return [
            Answer(tuple(ids), decode(ids), reading.density, prefill, seconds, *likely)
            for ids, (reading, seconds), prefill, likely in zip(ids_B, read, prefill_B, likely_B, strict=True)
        ]

    def _wait(self) -> None:
        if self._stack.device.type == "cuda":
            torch.cuda.synchronize(self._stack.device)

    def _decode(
        self,
        hidden_BC: torch.Tensor,
        lengths: Sequence[int],
        tokens: int,
        decode: Decode,
        samples: Sequence[Sample],
    ) -> list[list[int]]:
        """Decode greedily over all keys until each answer has ended or contains all right answers."""
        ends, said = set(self._stack.config.eos_ids), [list[int]() for _ in lengths]
        ended = [False] * len(lengths)
        for step in range(tokens):
            token_B = self._stack.logits(hidden_BC).argmax(-1)
            for place, token in enumerate(token_B.tolist()):
                ended[place] |= token in ends
                if not ended[place]:
                    said[place].append(token)
            if step == tokens - 1 or (step % 8 == 7 and self._all_done(samples, said, ended, decode)):
                break
            hidden_BC = self._next(token_B, lengths, step)
        return said

    def _likely(
        self, hidden_BC: torch.Tensor, lengths: Sequence[int], told_B: Sequence[Sequence[int]]
    ) -> list[tuple[float, float]]:
        """Return each given answer's mean log-probability and the share of its tokens that are likeliest."""
        logp_B, same_B = [0.0] * len(told_B), [0] * len(told_B)
        for step in range(max(map(len, told_B))):
            token_B = torch.tensor([ids[step] if step < len(ids) else 0 for ids in told_B])
            token_B = token_B.to(self._stack.device)
            logp_BV = self._stack.logits(hidden_BC).float().log_softmax(-1)
            own_B = logp_BV.gather(1, token_B[:, None])[:, 0].tolist()
            best_B = logp_BV.argmax(-1).tolist()
            for place, ids in enumerate(told_B):
                if step < len(ids):
                    logp_B[place] += own_B[place]
                    same_B[place] += best_B[place] == ids[step]
            hidden_BC = self._next(token_B, lengths, step)
        return [
            (logp / max(1, len(ids)), same / len(ids) if ids else 1.0)
            for logp, same, ids in zip(logp_B, same_B, told_B, strict=True)
        ]

    def _next(self, token_B: torch.Tensor, lengths: Sequence[int], step: int) -> torch.Tensor:
        """Append one token to each sample, after its prompt and `step` decoded tokens. Return hidden_BC."""
        positions_B = torch.tensor(lengths, device=self._stack.device) + step
        return self._stack.forward(self._stack.embed(token_B), positions_B, self._attend(positions_B))

    @staticmethod
    def _all_done(
        samples: Sequence[Sample], said: Sequence[list[int]], ended: Sequence[bool], decode: Decode
    ) -> bool:
        right = (sample.score(decode(ids)) == 1 for sample, ids in zip(samples, said, strict=True))
        return all(one or end for one, end in zip(right, ended, strict=True))

    def _attend(
        self, positions_B: torch.Tensor
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        batch, longest = len(positions_B), int(positions_B.max()) + 1
        place_B = torch.arange(batch, device=positions_B.device)
        back_B11S = (
            positions_B[:, None] - torch.arange(longest, device=positions_B.device)[None]
        )[:, None, None]  # fmt: skip
        unseen_B11S, windows = back_B11S < 0, self._stack.config.windows

        def attend(layer: int, q_BHD: torch.Tensor, k_BGD: torch.Tensor, v_BGD: torch.Tensor) -> torch.Tensor:
            self._k_LBGSD[layer, place_B, :, positions_B] = k_BGD
            self._v_LBGSD[layer, place_B, :, positions_B] = v_BGD
            k_BGSD, v_BGSD = (x[layer, :batch, :, :longest] for x in (self._k_LBGSD, self._v_LBGSD))
            q_BGJD = q_BHD.view(batch, k_BGD.shape[1], -1, q_BHD.shape[2])
            logits_BGJS = (q_BGJD @ k_BGSD.transpose(2, 3)).float() * q_BHD.shape[2] ** -0.5
            hidden_B11S = unseen_B11S
            if layer in windows:
                hidden_B11S = unseen_B11S | (back_B11S >= windows[layer])
            weights_BGJS = logits_BGJS.masked_fill_(hidden_B11S, float("-inf")).softmax(-1)
            attended_BHD: torch.Tensor = (weights_BGJS.to(v_BGSD.dtype) @ v_BGSD).view(q_BHD.shape)
            return attended_BHD

        return attend
