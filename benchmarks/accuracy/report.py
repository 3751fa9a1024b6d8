"""Makes rows, a table and gates from the outcome of each method on each document. Pure functions."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltafront.benchmarks.accuracy.paired import bootstrap_ratio, changes, mean_and_error, sign_test
from deltafront.benchmarks.markdown import markdown

Row = dict[str, Any]

BASELINE = "dense"

_SIGNS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one method on one document. Numbers that do not apply are None.

    Attributes:
        answers: (log-probability, exact) by subject of the question.
        kl, kl_p95: Mean and 95th percentile of KL(dense | method) over the tail's positions.
        key_logp: Mean log-probability of the tail's key tokens (`predictions.key_tokens`).
        agree: Share of questions whose greedy answer equals that of full decode.
        recompute_ms: The part of `ms` that recomputes blocks for a question.
    """

    case: str
    task: str
    tokens: int
    document: str
    density: float
    answers: Mapping[str, tuple[float, bool]]
    ms: float | None = None
    kl: float | None = None
    kl_p95: float | None = None
    perplexity: float | None = None
    key_tokens: int | None = None
    key_logp: float | None = None
    agree: float | None = None
    recompute_ms: float | None = None


def line(outcome: Outcome) -> str:
    """Return a line of progress for one document and method."""
    logp = _mean([logp for logp, _ in outcome.answers.values()])
    exact = sum(exact for _, exact in outcome.answers.values())
    parts = [
        f"{outcome.tokens:>7d} {outcome.task:8s} {outcome.document:24.24s} {outcome.case:34s}",
        f"density {outcome.density:.3f}",
        f"{_number(outcome.ms, '8.1f')} ms  KL {_number(outcome.kl, '6.4f')}",
        f"perplexity {_number(outcome.perplexity, '7.3f')}",
        f"exact {exact} of {len(outcome.answers)}  logp {_number(logp, '7.3f')}",
        f"agree {outcome.agree:.3f}" if outcome.agree is not None else "",
    ]
    return "  ".join(parts).rstrip()


def rows(outcomes: Sequence[Outcome], baseline: str) -> list[Row]:
    """Make one row for each length, task and case, over its documents. The row compares the case with
    `baseline` on the same documents. `ratio_95` and `logp_95` are bootstrapped over the documents in
    `by_document`. Keys that do not apply are missing.
    """
    groups: dict[tuple[int, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.tokens, outcome.task, outcome.case), []).append(outcome)
    return [
        _row(group, groups[tokens, task, baseline])
        for (tokens, task, _case), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _row(group: Sequence[Outcome], base: Sequence[Outcome]) -> Row:
    first = group[0]
    row: Row = {
        "case": first.case,
        "task": first.task,
        "tokens": first.tokens,
        "documents": len(group),
        "density": mean_and_error([o.density for o in group])[0],
        "ms": _median([o.ms for o in group]),
        "recompute_ms": _median([o.recompute_ms for o in group]),
        "kl": _mean([o.kl for o in group]),
        "kl_error": _error([o.kl for o in group]),
        "kl_p95": _mean([o.kl_p95 for o in group]),
        "perplexity": _mean([o.perplexity for o in group]),
        "perplexity_dense": None if first.perplexity is None else _mean([o.perplexity for o in base]),
        "agree": _mean([o.agree for o in group]),
        **_key_tokens(group, base),
    }
    documents = [_document(*pair) for pair in zip(group, base, strict=True)]
    if asked := [one for one in documents if "questions" in one]:
        row |= _answers(group, base) | _intervals(asked)
    row["by_document"] = documents
    return {key: value for key, value in row.items() if value is not None}


def _key_tokens(group: Sequence[Outcome], base: Sequence[Outcome]) -> Row:
    """Return the perplexity of key tokens with the method and with dense attention, and the interval over
    documents of the difference of both logarithms."""
    found = [(o.key_logp, d.key_logp, o.key_tokens) for o, d in zip(group, base, strict=True) if o.key_tokens]
    known = [(mine, dense, many) for mine, dense, many in found if mine is not None and dense is not None]
    if not known:
        return {}
    count = sum(many for *_, many in known)
    losses = [((dense - mine) * many, float(many)) for mine, dense, many in known]
    interval = bootstrap_ratio(losses)
    return {
        "key_tokens": count,
        "key_perplexity": math.exp(-sum(mine * many for mine, _, many in known) / count),
        "key_perplexity_dense": math.exp(-sum(dense * many for _, dense, many in known) / count),
        "key_loss": sum(loss for loss, _ in losses) / count,
        "key_loss_95": None if interval is None else list(interval),
    }


def _document(mine: Outcome, dense: Outcome) -> Row:
    """Return a document's numbers, from which a row's intervals can be bootstrapped again."""
    row: Row = {"document": mine.document, "density": mine.density, "kl": mine.kl}
    if mine.key_tokens and mine.key_logp is not None and dense.key_logp is not None:
        row |= {"key_tokens": mine.key_tokens, "key_loss": dense.key_logp - mine.key_logp}
    if mine.answers:
        row |= {
            "questions": len(mine.answers),
            "exact": sum(exact for _, exact in mine.answers.values()),
            "exact_dense": sum(dense.answers[about][1] for about in mine.answers),
            "logp_difference": mean_and_error(
                [logp - dense.answers[about][0] for about, (logp, _) in mine.answers.items()]
            )[0],
        }
    return {key: value for key, value in row.items() if value is not None}


def _intervals(documents: Sequence[Row]) -> Row:
    exact = bootstrap_ratio([(one["exact"], one["exact_dense"]) for one in documents])
    logp = bootstrap_ratio(
        [(one["logp_difference"] * one["questions"], one["questions"]) for one in documents]
    )
    return {
        "ratio_95": None if exact is None else list(exact),
        "logp_95": None if logp is None else list(logp),
    }


def _answers(group: Sequence[Outcome], base: Sequence[Outcome]) -> Row:
    """Return paired statistics of the group's questions. The baseline may have answered further questions."""
    pairs = [
        (f"{mine.document} {about}", answer, dense.answers[about])
        for mine, dense in zip(group, base, strict=True)
        for about, answer in mine.answers.items()
    ]
    names, answers, dense_answers = zip(*pairs, strict=True)
    exacts, dense_exacts = [exact for _, exact in answers], [exact for _, exact in dense_answers]
    logps, dense_logps = [logp for logp, _ in answers], [logp for logp, _ in dense_answers]
    changed = changes(dense_exacts, exacts)
    return {
        "questions": len(pairs),
        "exact": sum(exacts),
        "exact_dense": sum(dense_exacts),
        "lost": [names[i] for i in changed.lost],
        "won": [names[i] for i in changed.won],
        "p": sign_test(len(changed.lost), len(changed.won)),
        "logp": mean_and_error(logps)[0],
        "logp_dense": mean_and_error(dense_logps)[0],
        "logp_difference": mean_and_error([a - b for a, b in zip(logps, dense_logps, strict=True)])[0],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean_and_error(known)[0] if known else None


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median. Times need it, because the first document of a length may include compilations."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _error(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean_and_error(known)[1] if known else None


_HEADER = (
    "task", "case", "density", "ms", "recompute", "KL ±", "95%", "perplexity", "key tokens' loss, 95%",
    "exact (dense)",
    "ratio, 95%", "lost, won; p", "logp − dense's, 95%", "agree",
)  # fmt: skip


def table(found: Sequence[Row]) -> str:
    """Make a Markdown table for each length."""
    lines = []
    for tokens in dict.fromkeys(row["tokens"] for row in found):
        cells = [_cells(row) for row in found if row["tokens"] == tokens]
        lines += [f"\n{tokens:,} tokens\n", markdown(_HEADER, cells)]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    exact = ratio = changed = logp = ""
    if "questions" in row:
        exact = f"{row['exact']} of {row['questions']} ({row['exact_dense']})"
        exact += "" if judged(row) else ", not judged"
        ratio = _number(figure(row, "exact"), ".3f") + _interval(row.get("ratio_95"), ".3f")
        changed = f"{len(row['lost'])}, {len(row['won'])}; {row['p']:.2g}"
        logp = f"{row['logp_difference']:+.3f}" + _interval(row.get("logp_95"), "+.3f")
    kl = f"{_number(row.get('kl'), '.4f')} ± {_number(row.get('kl_error'), '.4f')}" if "kl" in row else ""
    key = _number(row.get("key_loss"), "+.3f") + _interval(row.get("key_loss_95"), "+.3f")
    return [
        row["task"],
        f"`{row['case']}`",
        f"{row['density']:.3f}",
        _number(row.get("ms"), ".1f"),
        _number(row.get("recompute_ms"), ".1f"),
        kl,
        _number(row.get("kl_p95"), ".3f"),
        _number(row.get("perplexity"), ".3f"),
        key,
        exact,
        ratio,
        changed,
        logp,
        _number(row.get("agree"), ".3f"),
    ]


def _interval(bounds: Sequence[float] | None, form: str) -> str:
    return "" if bounds is None else f", {bounds[0]:{form}} to {bounds[1]:{form}}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def judged(row: Row) -> bool:
    """Return True if dense attention answers at least half of the questions. A harder task cannot compare
    methods."""
    return "questions" in row and 2 * row["exact_dense"] >= row["questions"]


def together(found: Sequence[Row]) -> list[Row]:
    """Pool the tasks that are `judged`: make one row for each length and case with several such tasks.
    Intervals are bootstrapped over all their documents."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in filter(judged, found):
        groups.setdefault((row["tokens"], row["case"]), []).append(row)
    return [_together(group) for group in groups.values() if len(group) > 1]


def _together(group: Sequence[Row]) -> Row:
    documents = [one for row in group for one in row["by_document"] if "questions" in one]
    questions = sum(row["questions"] for row in group)
    lost, won = (sum(len(row[name]) for row in group) for name in ("lost", "won"))
    return {
        "case": group[0]["case"],
        "tokens": group[0]["tokens"],
        "tasks": [row["task"] for row in group],
        "documents": len(documents),
        "density": mean_and_error([one["density"] for one in documents])[0],
        "questions": questions,
        "exact": sum(row["exact"] for row in group),
        "exact_dense": sum(row["exact_dense"] for row in group),
        "lost": lost,
        "won": won,
        "p": sign_test(lost, won),
        "logp_difference": sum(row["logp_difference"] * row["questions"] for row in group) / questions,
        **_intervals(documents),
    }


def together_table(pooled: Sequence[Row]) -> str:
    header = (
        "tokens", "case", "judged tasks", "documents", "density", "exact (dense)", "ratio, 95%",
        "lost, won; p over questions", "logp − dense's, 95%",
    )  # fmt: skip
    cells = [
        [
            row["tokens"],
            f"`{row['case']}`",
            len(row["tasks"]),
            row["documents"],
            f"{row['density']:.3f}",
            f"{row['exact']} of {row['questions']} ({row['exact_dense']})",
            f"{row['exact'] / row['exact_dense']:.3f}" + _interval(row["ratio_95"], ".3f"),
            f"{row['lost']}, {row['won']}; {row['p']:.2g}",
            f"{row['logp_difference']:+.3f}" + _interval(row["logp_95"], "+.3f"),
        ]
        for row in pooled
    ]
    return markdown(header, cells)


def apart(found: Sequence[Row], recorded: Sequence[Row]) -> list[str]:
    """Return a line for each row that differs from the recorded row in density (by 0.002), KL (by 5% and by
    0.0005) or exact answers (by more than 10%). Smaller differences are rounding of different processors."""
    known = {(row["case"], row["task"], row["tokens"]): row for row in recorded}
    reasons = []
    for row in found:
        before = known.pop((row["case"], row["task"], row["tokens"]), None)
        where = f"{row['case']}, {row['task']}, {row['tokens']} tokens"
        if before is None:
            reasons.append(f"{where}: not recorded")
            continue
        bounds = {
            "density": 0.002,
            "kl": max(0.0005, 0.05 * before.get("kl", 0.0)),
            "exact": 0.1 * before.get("questions", 0),
        }
        for name, bound in bounds.items():
            if name in before and not abs(row.get(name, math.nan) - before[name]) <= bound:
                reasons.append(f"{where}: {name} is {row.get(name)}, {before[name]} was recorded")
    return [*reasons, *(f"{case}, {task}, {tokens} tokens: not run" for case, task, tokens in known)]


@dataclass(frozen=True)
class Gate:
    """Bounds that every row of a case must satisfy: (name of the number, sign, bound)."""

    case: str
    bounds: tuple[tuple[str, str, float], ...]


def parse_gate(given: str) -> Gate:
    """Parse a gate such as `METHOD:exact>=0.985,kl<=0.11`, with METHOD as in --methods. Raises ValueError."""
    case, colon, conditions = given.rpartition(":")
    bounds = []
    for condition in conditions.split(","):
        match = re.fullmatch(r"(\w+)(>=|<=)(-?[\d.]+(?:e-?\d+)?)", condition.strip())
        if match is None or match[1] not in FIGURES:
            known = ", ".join(FIGURES)
            raise ValueError(f"no gate {condition!r}: FIGURE>=NUMBER or FIGURE<=NUMBER of {known}")
        bounds.append((match[1], match[2], float(match[3])))
    if not colon or not case:
        raise ValueError(f"no gate {given!r}: METHOD:exact>=0.985,kl<=0.11")
    return Gate(case, tuple(bounds))


FIGURES = ("exact", "logp", "kl", "kl_p95", "density", "ms", "recompute_ms", "perplexity", "agree", "p")
"""Numbers that a gate can bound. `exact` is divided by that of dense attention; from `logp` and `perplexity`
those of dense attention are subtracted; others are as in the rows."""


def figure(row: Row, name: str) -> float | None:
    """Return the number of a row that a gate bounds, or None if the row lacks it."""
    if name == "exact":
        if "exact" not in row or not row["exact_dense"]:
            return None
        return float(row["exact"] / row["exact_dense"])
    if name == "logp":
        return row.get("logp_difference")
    if name == "perplexity":
        return row[name] - row["perplexity_dense"] if name in row else None
    return row.get(name)


def missed(gates: Sequence[Gate], found: Sequence[Row]) -> list[str]:
    """Return a line for each bound that a row misses. A bound is also missed if no row of its case has the
    number, or if the number is NaN."""
    reasons = []
    for gate in gates:
        mine = [row for row in found if row["case"] == gate.case]
        for name, sign, bound in gate.bounds:
            measured = [(row, value) for row in mine if (value := figure(row, name)) is not None]
            if not measured:
                reasons.append(f"{gate.case}: no row has {name}")
            for row, value in measured:
                if math.isnan(value) or not _SIGNS[sign](value, bound):
                    where = f"{row['task']}, {row['tokens']} tokens"
                    reasons.append(f"{gate.case}, {where}: {name} is {value:.4f}, not {sign} {bound:g}")
    return reasons
