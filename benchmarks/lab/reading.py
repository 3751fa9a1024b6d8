"""Reads samples one after another with a prefill method, and answers them together.

Suffixes as in `benchmarks.reader`, where B is 1; here B samples are answered at once, each by its own row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deltafront.benchmarks.lab.samples import Decode, Sample
from deltafront.benchmarks.reader import Reader, Reading
from deltafront.workers.model.decoder.stack import LayerStack


@dataclass(frozen=True)
class Case:
    """A method with options, and how many blocks are computed again for the prompt's end; 0: none, and the
    end stays as the method read it."""

    method: str
    blocks: int = 0

    @classmethod
    def parse(cls, given: str) -> Case:
        """`METHOD[:OPTIONS][@BLOCKS]`. Raises ValueError."""
        method, _, blocks = given.partition("@")
        if blocks and not blocks.isdecimal():
            raise ValueError(f"no case {given!r}: METHOD, METHOD:OPTION=NUMBER,… or METHOD:…@BLOCKS")
        return cls(method, int(blocks or 0))

    def __str__(self) -> str:
        return f"{self.method}@{self.blocks}" if self.blocks else self.method


@dataclass(frozen=True)
class Answer:
    """density: of tiles, with those for the prompt's end and its blocks. seconds: of reading, wall-clock."""

    said: str
    density: float
    seconds: float


class Together:
    """K/V of `places` samples of at most `room` tokens, answers included."""

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
        self, case: Case, samples: Sequence[Sample], chunk: int, tokens: int, decode: Decode
    ) -> list[Answer]:
        """Read at most `places` samples, and answer each with at most `tokens` tokens."""
        read = [
            self._read(reader, case, sample.ids, chunk)
            for reader, sample in zip(self._readers, samples, strict=False)
        ]
        first_BC = torch.cat([reading.tail_TC for reading, _ in read])
        said_B = self._decode(first_BC, [len(sample.ids) for sample in samples], tokens, decode, samples)
        return [
            Answer(said, reading.density, seconds)
            for said, (reading, seconds) in zip(said_B, read, strict=True)
        ]

    def _read(self, reader: Reader, case: Case, ids: Sequence[int], chunk: int) -> tuple[Reading, float]:
        self._wait()
        begun = time.monotonic()
        reading = reader.read(ids, case.method, chunk)
        if case.blocks and case.method != "dense":
            reading = reader.read_end_again(reading, case.blocks)
        self._wait()
        return reading, time.monotonic() - begun

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
    ) -> list[str]:
        """Decode greedily over all keys, until every answer has ended or holds what is right."""
        ends, said = set(self._stack.config.eos_ids), [list[int]() for _ in lengths]
        ended = [False] * len(lengths)
        positions_B = torch.tensor(lengths, device=self._stack.device)
        for step in range(tokens):
            token_B = self._stack.logits(hidden_BC).argmax(-1)
            for place, token in enumerate(token_B.tolist()):
                ended[place] |= token in ends
                if not ended[place]:
                    said[place].append(token)
            if step == tokens - 1 or (step % 8 == 7 and self._all_done(samples, said, ended, decode)):
                break
            embedded_BC = self._stack.embed(token_B)
            hidden_BC = self._stack.forward(embedded_BC, positions_B, self._attend(positions_B))
            positions_B = positions_B + 1
        return [decode(ids) for ids in said]

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
