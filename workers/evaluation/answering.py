"""Prefills samples one after another with an attention method, then decodes their answers as one batch.

Shape suffixes are defined in `reader`. B is the number of samples in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer

from deltafront.kernels.attention.sinks import with_sinks
from deltafront.workers.evaluation.comparison import TOLD, MeasuredAnswer
from deltafront.workers.evaluation.paged import PagedSteps, delta_plan
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.reader import Reader, Reading
from deltafront.workers.evaluation.sample_states import SampleStates
from deltafront.workers.evaluation.setting import Setting, delta_config, parse_method
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.decoder.stack import Attend, LayerStack
from deltafront.workers.prefill.stage.warm_up import warm_up

Decode = Callable[[Sequence[int]], str]
Steps = Callable[[torch.Tensor], Attend]
"""steps(positions_B) returns the attention of the decode step that appends a token at these positions."""


@dataclass(frozen=True)
class Forced:
    """The result of teacher-forcing given answers.

    Attributes:
        likely_B: For each answer its mean log-probability per token, and the share of its tokens that are the
            model's likeliest.
        agreed: Number of first tokens that are the model's likeliest in all answers.
        hidden_BC: The hidden rows after these tokens.
    """

    likely_B: list[tuple[float, float]]
    agreed: int
    hidden_BC: torch.Tensor


class Together:
    """Answers at most `places` samples as one batch. Its KV cache holds `room` tokens (prompt and answer) per
    sample.

    profile: The model's profile, for methods with the option `density`.
    """

    def __init__(self, stack: LayerStack, places: int, room: int, profile: Profile | None = None) -> None:
        config = stack.config
        self._index = {layer: n for n, layer in enumerate(config.attention_layers(stack.layers))}
        shape = (len(self._index), places, config.kv_heads, room, config.head_dim)
        self._stack = stack
        self._states = SampleStates(stack, places)
        self._k_LBGSD = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self._v_LBGSD = torch.zeros_like(self._k_LBGSD)
        self._readers = [
            Reader(
                stack,
                room,
                profile,
                kv=(self._k_LBGSD[:, place : place + 1], self._v_LBGSD[:, place : place + 1]),
                states=(self._states, place),
            )
            for place in range(places)
        ]

    @torch.inference_mode()
    def answers(
        self,
        settings: Sequence[Setting],
        samples: Sequence[Sample],
        chunk: int,
        tokens: int,
        decode: Decode,
        told: Sequence[Sequence[int]] | None = None,
    ) -> list[list[MeasuredAnswer]]:
        """Prefill each sample once. Then, for each setting, recompute its blocks and answer each sample with
        at most `tokens` tokens. Returns a list of answers per setting.

        Args:
            settings: Settings of one method and one `kv_dtype`, numbers of blocks ascending. Method `dense`
                recomputes none.
            samples: At most `places` samples.
            told: The token ids of dense attention's answers, whose probability is measured. None: those of
                the setting `dense` if it comes first, else each setting measures its own answers.
        """
        for reader in self._readers:
            reader.kv_dtype = settings[0].kv_dtype
        read = [
            self._timed(partial(reader.read, sample.ids, settings[0].method, chunk))
            for reader, sample in zip(self._readers, samples, strict=False)
        ]
        made = []
        for setting in settings:
            with ExitStack() as again:
                blocks = setting.blocks if setting.method != "dense" else 0
                ends = [
                    self._asked(again, reader, sample, blocks, *one)
                    for reader, sample, one in zip(self._readers, samples, read, strict=False)
                ]
                steps = self._attend
                if setting.delta and setting.kv_dtype is None:
                    kv = (x_LBGSD[:, : len(read)] for x_LBGSD in (self._k_LBGSD, self._v_LBGSD))
                    plan = delta_plan(self._stack, delta_config(setting.delta))
                    steps = PagedSteps(self._stack, plan, *kv).attend
                made.append(self._answered(ends, samples, tokens, decode, told, steps))
            if setting == Setting("dense"):
                told = told or [answer.ids for answer in made[-1]]
        return made

    def _timed(self, read: Callable[[], Reading]) -> tuple[Reading, float]:
        self._wait()
        begun = time.monotonic()
        reading = read()
        self._wait()
        return reading, time.monotonic() - begun

    def _asked(
        self,
        until: ExitStack,
        reader: Reader,
        sample: Sample,
        blocks: int,
        reading: Reading,
        seconds: float,
    ) -> tuple[Reading, float]:
        reader.rewind()
        if sample.question:
            asked = reader.asked(reading, sample.question, blocks)
        elif blocks:
            asked = reader.end_again(reading, blocks)
        else:
            return reading, seconds
        again, more = self._timed(lambda: until.enter_context(asked))
        return again, seconds + more

    def _answered(
        self,
        read: Sequence[tuple[Reading, float]],
        samples: Sequence[Sample],
        tokens: int,
        decode: Decode,
        told: Sequence[Sequence[int]] | None,
        steps: Steps,
    ) -> list[MeasuredAnswer]:
        first_BC = torch.cat([reading.tail_TC for reading, _ in read])
        lengths = [sample.tokens for sample in samples]
        if told is None:
            ids_B, logp_B = self._decode(first_BC, lengths, tokens, decode, samples, steps)
            likely_B = [(logp, 1.0) for logp in logp_B]  # each token is the likeliest
        else:
            forced = self._forced(first_BC, lengths, [ids[:TOLD] for ids in told], steps)
            begun_B, likely_B = [ids[: forced.agreed] for ids in told], forced.likely_B
            ids_B, _ = self._decode(forced.hidden_BC, lengths, tokens, decode, samples, steps, begun_B)
        each = zip(ids_B, read, likely_B, strict=True)
        return [
            MeasuredAnswer(tuple(ids), decode(ids), reading.density, seconds, *likely, reading.runs)
            for ids, (reading, seconds), likely in each
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
        steps: Steps,
        begun_B: Sequence[Sequence[int]] = (),
    ) -> tuple[list[list[int]], list[float]]:
        """Decode at most `tokens` tokens per sample greedily. Every eighth step, stop if each sample has
        ended or its text contains all right answers.

        Args:
            hidden_BC: The hidden rows after the tokens begun_B.
            begun_B: The samples' first tokens, equally many, whose KV is there; empty: none, and the
                log-probabilities are measured.

        Returns:
            The tokens, and the mean log-probability of the first TOLD ones; 0 where it is not measured.
        """
        ends, said = set(self._stack.config.eos_ids), [list[int]() for _ in lengths]
        measured: list[torch.Tensor] = []
        ended, begun = [False] * len(lengths), len(begun_B[0]) if begun_B else 0
        for step in range(tokens):
            if step < begun:
                token_B = torch.tensor([ids[step] for ids in begun_B])
            else:
                best_B, token_B = (logits_BV := self._stack.logits(hidden_BC).float()).max(-1)
                if not begun_B and step < TOLD:
                    measured.append(best_B - logits_BV.logsumexp(-1))
            for place, token in enumerate(token_B.tolist()):
                ended[place] |= token in ends
                if not ended[place]:
                    said[place].append(token)
            if step == tokens - 1 or (step % 8 == 7 and self._all_done(samples, said, ended, decode)):
                break
            if step >= begun:
                hidden_BC = self._next(token_B, lengths, step, steps)
        logp_BT = torch.stack(measured, 1).tolist() if measured else [[0.0]] * len(said)
        spoken = zip(logp_BT, (min(len(ids), TOLD) for ids in said), strict=True)
        return said, [sum(logp_T[:count]) / max(1, count) for logp_T, count in spoken]

    def _forced(
        self,
        hidden_BC: torch.Tensor,
        lengths: Sequence[int],
        told_B: Sequence[Sequence[int]],
        steps: Steps,
    ) -> Forced:
        """Teacher-force the given answers `told_B`. States are then those after the tokens that agreed."""
        self._mark(len(told_B))
        logp_B, same_B = [0.0] * len(told_B), [0] * len(told_B)
        agreed, agreed_BC, agrees = 0, hidden_BC, True
        for step in range(max(map(len, told_B))):
            token_B = torch.tensor([ids[step] if step < len(ids) else 0 for ids in told_B])
            token_B = token_B.to(self._stack.device)
            logits_BV = self._stack.logits(hidden_BC).float()
            own_B = (logits_BV.gather(1, token_B[:, None])[:, 0] - logits_BV.logsumexp(-1)).tolist()
            best_B = logits_BV.argmax(-1).tolist()
            for place, ids in enumerate(told_B):
                if step < len(ids):
                    logp_B[place] += own_B[place]
                    same_B[place] += best_B[place] == ids[step]
            agrees &= all(step < len(ids) and best_B[place] == ids[step] for place, ids in enumerate(told_B))
            hidden_BC = self._next(token_B, lengths, step, steps)
            if agrees:
                agreed, agreed_BC = step + 1, hidden_BC
                self._mark(len(told_B))
        for place in range(len(told_B)):
            self._states.rewind(place, "agreed")
        likely_B = [
            (logp / max(1, len(ids)), same / len(ids) if ids else 1.0)
            for logp, same, ids in zip(logp_B, same_B, told_B, strict=True)
        ]
        return Forced(likely_B, agreed, agreed_BC)

    def _mark(self, samples: int) -> None:
        for place in range(samples):
            self._states.mark(place, "agreed")

    def _next(self, token_B: torch.Tensor, lengths: Sequence[int], step: int, steps: Steps) -> torch.Tensor:
        """Run one decode step: append token_B to the samples, after `step` decoded tokens. Return
        hidden_BC."""
        positions_B = torch.tensor(lengths, device=self._stack.device) + step
        states = self._states.step(len(token_B))
        return self._stack.forward(
            self._stack.embed(token_B), positions_B, steps(positions_B), row_states=states
        )

    @staticmethod
    def _all_done(
        samples: Sequence[Sample], said: Sequence[list[int]], ended: Sequence[bool], decode: Decode
    ) -> bool:
        return all(
            end or (bool(sample.prompt.answers) and sample.prompt.score(decode(ids)) == 1)
            for sample, ids, end in zip(samples, said, ended, strict=True)
        )

    def _attend(self, positions_B: torch.Tensor) -> Attend:
        """Return the attention of one decode step over all keys."""
        batch, longest = len(positions_B), int(positions_B.max()) + 1
        place_B = torch.arange(batch, device=positions_B.device)
        back_B11S = (
            positions_B[:, None] - torch.arange(longest, device=positions_B.device)[None]
        )[:, None, None]  # fmt: skip
        unseen_B11S, windows, kept = back_B11S < 0, self._stack.config.windows, self._readers[0].kept

        def attend(layer: int, q_BHD: torch.Tensor, k_BGD: torch.Tensor, v_BGD: torch.Tensor) -> torch.Tensor:
            own = self._index[layer]
            self._k_LBGSD[own, place_B, :, positions_B] = kept(k_BGD)
            self._v_LBGSD[own, place_B, :, positions_B] = kept(v_BGD)
            k_BGSD, v_BGSD = (x[own, :batch, :, :longest] for x in (self._k_LBGSD, self._v_LBGSD))
            q_BGJD = q_BHD.view(batch, k_BGD.shape[1], -1, q_BHD.shape[2])
            logits_BGJS = (q_BGJD @ k_BGSD.transpose(2, 3)).float() * q_BHD.shape[2] ** -0.5
            hidden_B11S = unseen_B11S
            if layer in windows:
                hidden_B11S = unseen_B11S | (back_B11S >= windows[layer])
            weights_BGJS = logits_BGJS.masked_fill_(hidden_B11S, float("-inf")).softmax(-1)
            attended_BHD: torch.Tensor = (weights_BGJS.to(v_BGSD.dtype) @ v_BGSD).view(q_BHD.shape)
            if (sink_H := self._stack.sinks(layer)) is not None:
                return with_sinks(attended_BHD, logits_BGJS.logsumexp(-1).flatten(1), sink_H)
            return attended_BHD

        return attend


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


MOST_PLACES = 16
"""Maximum number of samples that an evaluation answers at once. They share their decode steps' launches."""


def places_for(stack: LayerStack, room: int) -> int:
    """Return how many samples an evaluation answers at once: as many as have room for a KV cache of `room`
    tokens in half of the GPU's free memory, at most `MOST_PLACES`. On a CPU 1, since prefill takes nearly all
    of the time."""
    if stack.device.type != "cuda":
        return 1
    torch.cuda.empty_cache()
    free, _all = torch.cuda.mem_get_info(stack.device)
    layers = len(stack.config.attention_layers(stack.layers))
    each = room * stack.config.kv_values(layers) * stack.dtype.itemsize
    return max(1, min(MOST_PLACES, free // 2 // each))


class OneModel:
    """A model that answers at most `places` samples at once (`places_for`).

    Args:
        room: Tokens of the longest prompt.
        chunk: Tokens that are prefilled at once.
        tokens: Tokens of the longest answer.
    """

    def __init__(
        self,
        stack: LayerStack,
        tokenizer: Tokenizer,
        room: int,
        chunk: int,
        tokens: int,
        profile: Profile | None = None,
    ) -> None:
        self.places = places_for(stack, room + tokens)
        self._together = Together(stack, self.places, room + tokens, profile)
        self._tokenizer, self._chunk, self._tokens = tokenizer, chunk, tokens
        if stack.device.type == "cuda":  # so that the first prompt's time has no compilation
            warm_up(stack, [parse_method("dense")], chunk, profile)

    def sample(self, prompt: TaskPrompt, session: bool) -> Sample:
        """Tokenise document and question separately, so that the token ids are the same whether the question
        ends the prompt or is appended to a session."""
        if not prompt.document:
            return Sample(prompt, tuple(self._tokenizer.encode(prompt.question).ids))
        document = tuple(self._tokenizer.encode(prompt.document).ids)
        question = tuple(self._tokenizer.encode(prompt.question, add_special_tokens=False).ids)
        return Sample(prompt, document, question) if session else Sample(prompt, document + question)

    def answers(
        self,
        samples: Sequence[Sample],
        method: str,
        blocks: Sequence[int],
        told: Sequence[Sequence[int]] | None,
    ) -> list[list[MeasuredAnswer]]:
        settings = [Setting(method, count) for count in blocks]
        decode = self._tokenizer.decode
        return self._together.answers(settings, samples, self._chunk, self._tokens, decode, told)
