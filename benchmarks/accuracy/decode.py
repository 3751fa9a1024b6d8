"""Decodes answers with DELTA's or Quest's page selection. All questions on a document are rows of one batch.

The rows share the document's full pages. Each row has separate pages for the document's last, partial page,
its question and its answer. Questions are prefilled densely, as in a session. Then all rows decode together
with the decode worker's attention.

Shape suffixes are those of `questions` and `workers.decode.decode_attention`; R = Q rows of the batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deltafront.benchmarks.accuracy.predictions import predicted
from deltafront.benchmarks.accuracy.quest import QuestAttention, QuestPlan
from deltafront.benchmarks.accuracy.questions import Answered, ask, padded
from deltafront.benchmarks.paper_forms.delta_layers import periodic_layers, random_layers
from deltafront.kernels.layers.kv_int8 import quantise
from deltafront.workers.calibration.probes import Question
from deltafront.workers.calibration.sensitivity import divergence
from deltafront.workers.decode.decode_attention import BatchRows, LayerPlan, StepAttention, plan_layers
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.kv.cache import PagedKVCache, Sides
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.prefill.stage.phases import PhaseTimer, phase_timer
from deltafront.workers.settings import DecodeConfig


@dataclass(frozen=True)
class Decoded:
    """The result of one page selection.

    Attributes:
        answers: The right answers' log-probabilities, teacher-forced.
        kl: Mean KL(full decode | this) of the answers' tokens after the first.
        agrees: For each question, True if the greedy answer equals that of full decode. Both answers have the
            right answer's length.
        share: Pages read, divided by those of full decode, over all layers.
        milliseconds: Median time of page selection and attention in all layers of a decode step: device time
            on a GPU, wall-clock time on a CPU.
    """

    answers: list[Answered]
    kl: float
    agrees: list[bool]
    share: float
    milliseconds: float


@dataclass(frozen=True)
class _Steps:
    """Results by decode step: hidden rows, log-probability of the right token, and the most likely token."""

    hidden_ARC: torch.Tensor
    logp_AR: torch.Tensor
    best_AR: torch.Tensor
    share: float
    milliseconds: float


Selection = LayerPlan | QuestPlan
FORMS = "quest:BUDGET, or LAYER,LAYER… or periodic:COUNT or random:COUNT:SEED with :BUDGET[:RECENCY]"


def parse_selection(given: str, layers: int) -> Selection:
    """Parse Δ-layers, page budget and recency, such as `8,14,18,20,21:256` or `8,14,18,20,21:256:8`.
    `periodic:3:256` has three evenly spaced layers, `random:3:7:256` three random layers of seed 7,
    `quest:256` is Quest's selection. Raises ValueError.
    """
    delta_layers, *numbers = given.split(":")
    if delta_layers == "quest" and len(numbers) == 1 and int(numbers[0]) > 0:
        return QuestPlan(layers, int(numbers[0]))
    if delta_layers == "periodic" and numbers:
        chosen = periodic_layers(layers, int(numbers.pop(0)))
    elif delta_layers == "random" and len(numbers) > 1:
        chosen = random_layers(layers, int(numbers.pop(0)), int(numbers.pop(0)))
    else:
        chosen = tuple(int(layer) for layer in delta_layers.split(","))
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"no page selection {given!r}: {FORMS}")
    budget, recency = [*map(int, numbers), DecodeConfig.recency][:2]
    config = DecodeConfig(full_layers=(), delta_layers=chosen, page_budget=budget, recency=recency)
    return plan_layers(config, layers)


class AnswerDecoder:
    """Decodes questions on the reader's document with any number of page selections.

    Args:
        beside: A decoder of the same questions, whose full decode is the baseline. None: this decoder's full
            decode is the baseline.

    Raises:
        ValueError: No answer has a second token. The first token is predicted by prefill.
    """

    @torch.inference_mode()
    def __init__(
        self, reader: Reader, questions: Sequence[Question], beside: AnswerDecoder | None = None
    ) -> None:
        if all(len(question.gold) < 2 for question in questions):
            raise ValueError("nothing to decode: every right answer is one token")
        self._reader = reader
        self.questions = questions
        self.layers = reader.stack.config.layers
        config, stack = reader.stack.config, reader.stack
        whole, rest = divmod(reader.length, PAGE_TOKENS)
        # All rows decode until the longest answer is done.
        longest = max(len(q.prompt) for q in questions) + max(len(q.gold) for q in questions)
        own = pages_for(rest + longest)
        pages = whole + 1 + own * len(questions)
        heads, int8 = (config.kv_heads, config.head_dim), reader.kv_dtype == "int8"
        self._cache = PagedKVCache(range(config.layers), *heads, pages, stack.dtype, stack.device, int8=int8)
        own_RP = whole + 1 + torch.arange(own * len(questions)).view(-1, own)
        shared_RP = torch.arange(whole).expand(len(questions), -1)
        self._table_RP = torch.cat([shared_RP, own_RP], dim=1).to(stack.device, torch.int32)
        for layer in stack.layers:
            document = (x_GSD.transpose(0, 1) for x_GSD in reader.document(layer))
            self._cache.write_run(layer, 0, 0, *self._sides(*document))
        if rest:
            for page in own_RP[:, 0].tolist():
                self._cache.copy_page(whole, page)
        self._first = self._ask_all()
        self._full = self._decode(None, forced=True)
        self._greedy = self._decode(None, forced=False)
        self._beside = beside or self

    def _sides(self, k: torch.Tensor, v: torch.Tensor) -> Sides:
        """Return k and v as the pages store them. For an int8 KV cache, quantise them and add their
        scales."""
        if not self._cache.int8:
            return k, v
        (k_bytes, k_scales), (v_bytes, v_scales) = quantise(k), quantise(v)
        return k_bytes, v_bytes, k_scales, v_scales

    def _ask_all(self) -> list[Answered]:
        """Prefill all questions with their answers, write their KV to pages, and return the answers' results.
        Decode steps overwrite the answers' KV."""

        def keep(layer: int, indices: Sequence[int], k_QLGD: torch.Tensor, v_QLGD: torch.Tensor) -> None:
            own_L = torch.arange(k_QLGD.shape[1], device=k_QLGD.device)
            positions_QL = (self._reader.length + own_L).expand(len(indices), -1)
            self._write(layer, self._table_RP[list(indices)], positions_QL, k_QLGD, v_QLGD)

        return ask(self._reader, self.questions, keep)

    def _write(
        self,
        layer: int,
        table_RP: torch.Tensor,
        positions_RL: torch.Tensor,
        k_RLGD: torch.Tensor,
        v_RLGD: torch.Tensor,
    ) -> None:
        """Write keys and values of requests to their pages at the given positions."""
        pages_RL = table_RP.gather(1, positions_RL // PAGE_TOKENS).long()
        rows_T = (pages_RL * PAGE_TOKENS + positions_RL % PAGE_TOKENS).flatten()
        for cache_R, new_RL in zip(self._cache.rows(layer), self._sides(k_RLGD, v_RLGD), strict=True):
            cache_R[rows_T] = new_RL.flatten(0, 1).to(cache_R.dtype)

    @torch.inference_mode()
    def decode(self, plan: Selection | None) -> Decoded:
        """Decode with the page selection `plan`, or over all pages if `plan` is None."""
        forced = self._full if plan is None else self._decode(plan, forced=True)
        greedy = self._greedy if plan is None else self._decode(plan, forced=False)
        answers, agrees = [], []
        kl_T = divergence(
            self._reader.stack, *(x.hidden_ARC[self._answered_AR] for x in (self._beside._full, forced))
        )
        for row, (question, first) in enumerate(zip(self.questions, self._first, strict=True)):
            steps = len(question.gold) - 1
            exact = [first.first, *forced.best_AR[:steps, row].tolist()] == list(question.gold)
            logp = float(forced.logp_AR[:steps, row].sum()) + first.first_logp
            answers.append(Answered(logp, exact, first.first, first.first_logp))
            full_AR = self._beside._greedy.best_AR
            agrees.append(torch.equal(greedy.best_AR[:steps, row], full_AR[:steps, row]))
        return Decoded(answers, float(kl_T.mean()), agrees, forced.share, forced.milliseconds)

    @property
    def _answered_AR(self) -> torch.Tensor:
        """Mark the steps that belong to each row's answer. Rows with shorter answers run more steps."""
        steps_R = torch.tensor([len(question.gold) - 1 for question in self.questions])
        return (torch.arange(int(steps_R.max()))[:, None] < steps_R).to(self._reader.stack.device)

    @torch.inference_mode()
    def _decode(self, plan: Selection | None, *, forced: bool) -> _Steps:
        """Decode all questions. plan: None: full decode. forced: Feed the right answers' tokens."""
        stack, questions = self._reader.stack, self.questions
        device, steps = stack.device, max(len(q.gold) for q in questions) - 1
        gold_RA = torch.tensor([padded(q.gold, steps + 1) for q in questions], device=device)
        prompt_R = torch.tensor([len(q.prompt) for q in questions], device=device)
        ids_R = gold_RA[:, 0] if forced else torch.tensor([a.first for a in self._first], device=device)
        full, config = DecodeConfig(full_layers=(), page_selection="full"), stack.config
        roles = plan or plan_layers(full, config.layers, config.windows)
        hiddens, logps, bests, spent, read, held = [], [], [], list[float](), 0, 0
        for step in range(steps):
            positions_R = self._reader.length + prompt_R + step
            attention = self._step(roles, plan is not None, positions_R)
            timer = phase_timer(device)
            hidden_RC = self._forward(ids_R, positions_R, attention, timer)
            logp_R, best_R = predicted(stack, hidden_RC, gold_RA[:, step + 1])
            hiddens.append(hidden_RC)
            logps.append(logp_R)
            bests.append(best_R)
            spent.append(1e3 * sum(timer.seconds().values()))
            ids_R = gold_RA[:, step + 1] if forced else best_R.to(device)
            for position in positions_R.tolist():
                attended, could = roles.pages_read(position + 1, plan is not None)
                every = stack.config.layers * pages_for(position + 1)
                read, held = read + every - could + attended, held + every
        share, milliseconds = read / held, statistics.median(spent)
        return _Steps(torch.stack(hiddens), torch.stack(logps), torch.stack(bests), share, milliseconds)

    def _step(
        self, plan: Selection, selects: bool, positions_R: torch.Tensor
    ) -> StepAttention | QuestAttention:
        lengths_R = (positions_R + 1).to(torch.int32)
        rows = BatchRows(self._table_RP, lengths_R, torch.ones_like(lengths_R) if selects else None)
        scale = self._reader.stack.config.head_dim**-0.5
        if isinstance(plan, QuestPlan):
            return QuestAttention(plan, rows, scale)
        return StepAttention(plan, rows, scale)

    def _forward(
        self,
        ids_R: torch.Tensor,
        positions_R: torch.Tensor,
        attention: StepAttention | QuestAttention,
        timer: PhaseTimer,
    ) -> torch.Tensor:
        def attend(layer: int, q_RHD: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> torch.Tensor:
            self._write(layer, self._table_RP, positions_R[:, None], k_RGD[:, None], v_RGD[:, None])
            with timer.phase("attention"):
                pages, scales = self._cache.layer(layer), self._cache.scales(layer)
                if isinstance(attention, QuestAttention):
                    return attention.attend(layer, q_RHD, *pages)
                return attention.attend(layer, q_RHD, *pages, scales)

        stack = self._reader.stack
        return stack.forward(stack.embed(ids_R), positions_R, attend)
