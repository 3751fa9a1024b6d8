"""Asks many questions on a document in one pass. Each question extends the document's KV cache and is
prefilled densely with its right answer (teacher-forced).

Attention over the document and over a question's own tokens is computed separately and merged by log-sum-exp,
which is exact. So questions do not see one another, and the document is stored once. `ask_recomputed` asks
one question after another, each after recomputing the blocks that it attends to most.

Shape suffixes: Q questions of a pass, L rows of the longest of them, S tokens of the document, H query heads,
G key/value heads, J = H / G, D head dimension, T = Q x L rows, R = J x T.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deltafront.benchmarks.accuracy.predictions import predicted
from deltafront.kernels.methods import resume_step
from deltafront.workers.calibration.probes import Question
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import parse_method
from deltafront.workers.model.decoder.recompute import BlockAttention
from deltafront.workers.prefill.stage.phases import phase_timer

READ_AGAIN = 512
"""Tokens at a document's end that are prefilled again when a question extends the prompt, because methods
compute the last rows of a prompt differently."""

ROWS = 4096
"""Maximum number of rows of one pass. A single question may have more."""

Keep = Callable[[int, Sequence[int], torch.Tensor, torch.Tensor], None]
"""keep(layer, indices, k_QLGD, v_QLGD) receives the keys and values of the questions with these indices."""

Look = Callable[[int, int, torch.Tensor], None]
"""look(layer, index, q_LHD) receives the rotated queries of this question's prompt."""


@dataclass(frozen=True)
class Answered:
    """The result of one question.

    Attributes:
        logp: Natural log-probability of the whole right answer.
        exact: True if each of its tokens was the most likely one.
        first: The most likely first token.
        first_logp: Log-probability of the right answer's first token.
    """

    logp: float
    exact: bool
    first: int
    first_logp: float


@dataclass(frozen=True)
class Looked:
    """A question's attention mass on each block of the document (`looks`), and the time to compute it."""

    looks: BlockAttention
    milliseconds: float


@dataclass(frozen=True)
class Recomputed:
    """Answers to questions that were asked after their most attended blocks were recomputed densely.

    Attributes:
        tiles: Mean number of tiles recomputed for a question, per head and layer.
        milliseconds: Median time to find and recompute a question's blocks: device time on a GPU, wall-clock
            time on a CPU.
    """

    answers: list[Answered]
    tiles: float
    milliseconds: float


@torch.inference_mode()
def ask(
    reader: Reader, questions: Sequence[Question], keep: Keep | None = None, look: Look | None = None
) -> list[Answered]:
    """Answer each question over the reader's document. The reader does not change.

    Args:
        keep: Called for every layer of every pass with the questions' keys and values.
        look: Called for every layer and question with the rotated queries of the question's prompt.
    """
    answered: dict[int, Answered] = {}
    for indices in _passes([_rows(question) for question in questions]):
        found = _one_pass(reader, [questions[i] for i in indices], indices, keep, look)
        answered |= dict(zip(indices, found, strict=True))
    return [answered[i] for i in range(len(questions))]


def ask_and_look(reader: Reader, questions: Sequence[Question]) -> tuple[list[Answered], list[Looked]]:
    """Answer each question by `ask`, and also return its attention to the document's blocks."""
    looks = [BlockAttention(reader.length) for _ in questions]
    timers = [phase_timer(reader.stack.device) for _ in questions]

    def look(layer: int, index: int, q_LHD: torch.Tensor) -> None:
        with timers[index].phase("looks"):
            looks[index].add(q_LHD, reader.document(layer)[0])

    answers = ask(reader, questions, look=look)
    spent = [1e3 * sum(timer.seconds().values()) for timer in timers]
    return answers, [Looked(*pair) for pair in zip(looks, spent, strict=True)]


@torch.inference_mode()
def ask_recomputed(
    reader: Reader, questions: Sequence[Question], looked: Sequence[Looked], count: int
) -> Recomputed:
    """Ask each question after recomputing the `count` blocks that it attends to most. The reader does not
    change.

    questions: At least one.
    """
    answers, tiles, spent = list[Answered](), list[int](), list[float]()
    for question, found in zip(questions, looked, strict=True):
        timer = phase_timer(reader.stack.device)
        with timer.phase("looks"):
            blocks = found.looks.most_attended(count)
        with reader.recomputed(blocks, timer.phase):
            answers += ask(reader, [question])
        tiles.append(sum(block + 1 for block in blocks))
        spent.append(found.milliseconds + 1e3 * sum(timer.seconds().values()))
    return Recomputed(answers, statistics.mean(tiles), statistics.median(spent))


@torch.inference_mode()
def ask_one_by_one(reader: Reader, question: Question) -> tuple[float, bool]:
    """Return logp and exact by appending the question and its answer token by token, as a check of `ask`."""
    before, logp, exact = reader.length, 0.0, True
    logits_V = reader.next_logits(question.prompt)
    for token in question.gold:
        logp += float(logits_V.log_softmax(-1)[token])
        exact &= int(logits_V.argmax()) == token
        logits_V = reader.next_logits([token])
    reader.length = before
    return logp, exact


@torch.inference_mode()
def ask_in_prompt(
    reader: Reader, ids: Sequence[int], questions: Sequence[Question], method: str, chunk: int
) -> list[Answered]:
    """Answer questions, each at the end of a prompt: the document `ids`, then the question, prefilled with
    the method.

    The reader must have just prefilled the document with the method. Only the end of each prompt is prefilled
    again, unless the method cannot resume from keys or is dense for the document without question. Answers
    are prefilled densely, as in decode.
    """
    named = parse_method(method)
    step, short = resume_step(named), named.values.get("min_tokens", 0)
    before = max(0, len(ids) - READ_AGAIN) // step * step if step else 0
    answered = []
    for question in questions:
        prompt = [*ids, *question.prompt]
        after = 0 if len(ids) <= short < len(prompt) else before
        last_1C = reader.read(prompt, method, chunk, after=after).tail_TC
        rows_AC = torch.cat([last_1C, reader.append(question.gold[:-1])]) if question.gold[1:] else last_1C
        logp_A, best_A = predicted(reader.stack, rows_AC, torch.tensor(question.gold))
        exact = best_A.tolist() == list(question.gold)
        answered.append(Answered(float(logp_A.sum()), exact, int(best_A[0]), float(logp_A[0])))
    reader.length = len(ids)
    return answered


def by_subject(questions: Sequence[Question], answers: Sequence[Answered]) -> dict[str, tuple[float, bool]]:
    """Return (logp, exact) by subject: log of the right answers' total probability; True if any is exact."""
    logps: dict[str, list[float]] = {}
    exacts: dict[str, bool] = {}
    for question, answer in zip(questions, answers, strict=True):
        logps.setdefault(question.about, []).append(answer.logp)
        exacts[question.about] = exacts.get(question.about, False) or answer.exact
    return {
        about: (float(torch.tensor(each, dtype=torch.float64).logsumexp(0)), exacts[about])
        for about, each in logps.items()
    }


def _rows(question: Question) -> int:
    """Count a question's rows. The answer's last token needs no row, since no token follows."""
    return len(question.prompt) + len(question.gold) - 1


def _passes(rows: Sequence[int]) -> Iterator[list[int]]:
    """Group questions of similar length, so that a group padded to its longest has at most ROWS rows."""
    part: list[int] = []
    for index in sorted(range(len(rows)), key=rows.__getitem__):
        if part and rows[index] * (len(part) + 1) > ROWS:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def _one_pass(
    reader: Reader,
    questions: Sequence[Question],
    indices: Sequence[int],
    keep: Keep | None,
    look: Look | None,
) -> list[Answered]:
    stack, longest = reader.stack, max(map(_rows, questions))
    ids_QL = torch.tensor([padded([*q.prompt, *q.gold[:-1]], longest) for q in questions])
    own_L = torch.arange(longest, device=stack.device)
    positions_T = (reader.length + own_L).repeat(len(questions))

    def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        kept = q_THD, reader.kept(k_TGD), reader.kept(v_TGD)
        q_QLHD, k_QLGD, v_QLGD = (x.reshape(-1, longest, *x.shape[1:]) for x in kept)
        if keep is not None:
            keep(layer, indices, k_QLGD, v_QLGD)
        if look is not None:
            for index, question, q_LHD in zip(indices, questions, q_QLHD, strict=True):
                look(layer, index, q_LHD[: len(question.prompt)])
        out_QLHD = attend_appended(q_QLHD, k_QLGD, v_QLGD, *reader.document(layer))
        return out_QLHD.flatten(0, 1)

    hidden_TC = stack.forward(stack.embed(ids_QL.flatten()), positions_T, attend)
    row: list[int] = []
    gold: list[int] = []
    for i, question in enumerate(questions):
        first = i * longest + len(question.prompt) - 1
        row += range(first, first + len(question.gold))
        gold += question.gold
    logp_A, best_A = predicted(stack, hidden_TC[torch.tensor(row, device=stack.device)], torch.tensor(gold))
    answers, done = [], 0
    for question in questions:
        span = slice(done, done := done + len(question.gold))
        exact = best_A[span].tolist() == list(question.gold)
        logp, first_logp = float(logp_A[span].sum()), float(logp_A[span.start])
        answers.append(Answered(logp, exact, int(best_A[span.start]), first_logp))
    return answers


def padded(ids: Sequence[int], length: int) -> list[int]:
    return [*ids, *[0] * (length - len(ids))]


def attend_appended(
    q_QLHD: torch.Tensor,
    k_QLGD: torch.Tensor,
    v_QLGD: torch.Tensor,
    k_GSD: torch.Tensor,
    v_GSD: torch.Tensor,
) -> torch.Tensor:
    """Compute out_QLHD of rows that attend to the whole document and, causally, to their own question."""
    questions, rows, heads, dim = q_QLHD.shape
    groups, scale = k_QLGD.shape[2], dim**-0.5
    q_QLGJD = q_QLHD.reshape(questions, rows, groups, heads // groups, dim)
    q_GRD = q_QLGJD.permute(2, 3, 0, 1, 4).reshape(groups, -1, dim)
    far_GRD, far_GR = _over_document(q_GRD, k_GSD, v_GSD, scale)
    far_GJQLD = far_GRD.view(groups, heads // groups, questions, rows, dim)
    near_GJQLD, near_GJQL = _over_own(q_QLGJD.float(), k_QLGD.float(), v_QLGD.float(), scale)
    share_GJQL = torch.sigmoid(far_GR.view(near_GJQL.shape) - near_GJQL)
    out_GJQLD = torch.lerp(near_GJQLD, far_GJQLD.float(), share_GJQL[..., None])
    return out_GJQLD.permute(2, 3, 0, 1, 4).flatten(2, 3).to(q_QLHD.dtype)


def _over_document(
    q_GRD: torch.Tensor, k_GSD: torch.Tensor, v_GSD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out_GRD and lse_GR of rows that attend to every key, by PyTorch's internal flash kernels,
    because SDPA does not return the log-sum-exp. For float32 on a GPU it uses the memory-efficient kernel."""
    q, k, v = (x[None].contiguous() for x in (q_GRD, k_GSD, v_GSD))
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
    elif q.dtype == torch.float32:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)[:2]
    return out[0], lse[0, :, : q_GRD.shape[1]].float()


def _over_own(
    q_QLGJD: torch.Tensor, k_QLGD: torch.Tensor, v_QLGD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out_GJQLD and lse_GJQL (float32) of causal attention within each question."""
    rows = q_QLGJD.shape[1]
    logits_GJQLM = torch.einsum("qlgjd,qmgd->gjqlm", q_QLGJD, k_QLGD) * scale
    future_LM = torch.ones(rows, rows, dtype=torch.bool, device=q_QLGJD.device).triu(1)
    logits_GJQLM = logits_GJQLM.masked_fill(future_LM, float("-inf"))
    out_GJQLD = torch.einsum("gjqlm,qmgd->gjqld", logits_GJQLM.softmax(-1), v_QLGD)
    return out_GJQLD, logits_GJQLM.logsumexp(-1)
