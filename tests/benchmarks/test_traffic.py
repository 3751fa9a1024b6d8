"""Tests the plans and the summaries of the traffic benchmark against brute force."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.benchmarks.traffic import plan, sessions
from deltafront.benchmarks.traffic.__main__ import parsed
from deltafront.benchmarks.traffic.client import Answer, Bodies
from deltafront.benchmarks.traffic.plan import BLOCK, Caller, Turn, prompt
from deltafront.benchmarks.traffic.play import Played
from deltafront.benchmarks.traffic.report import (
    Limits,
    gaps_during,
    good,
    medians,
    merged,
    quantile,
    report,
    summary,
)
from deltafront.benchmarks.traffic.sessions import Bounds

SECONDS = st.floats(0, 100, allow_nan=False)


def ids(turn: Turn, seed: int = 0, vocabulary: int = 1000) -> list[int]:
    return [int(one) for one in plan.token_ids(turn, seed, vocabulary)]


def answer(due_s: float, arrivals_s: list[float], **more: Any) -> Answer:
    turn = prompt(0, 10, len(arrivals_s), more.pop("part", ""))
    made = {"tokens": len(arrivals_s), "done_s": arrivals_s[-1] if arrivals_s else 0.0, **more}
    return Answer(turn, due_s, arrivals_s=arrivals_s, **made)


# --- plans -------------------------------------------------------------------------------------------------


def test_equal_blocks_of_a_session_have_equal_tokens() -> None:
    first, later = Turn(3, [5, 6, 7], 150, 1), Turn(3, [5, 6, 9, 7], 4 * BLOCK, 1)
    assert len(ids(first)) == 150 and len(ids(later)) == 256
    assert ids(first)[:128] == ids(later)[:128] and ids(first)[128:] == ids(later)[192:214]
    assert ids(later)[128:192] != ids(later)[192:]
    assert ids(first) != ids(Turn(4, [5, 6, 7], 150, 1)) and ids(first) != ids(first, seed=1)
    assert set(ids(prompt(0, 5000, 1), vocabulary=7)) == set(range(7))


def test_mixed_loads_have_the_named_prompts() -> None:
    shapes = {
        name: [(caller.start_s, turn.tokens, turn.answer) for caller in callers for turn in caller.turns]
        for name, callers in plan.mixed().items()
    }
    assert shapes["10x32768"] == [(0.0, 32_768, 128)] * 10
    assert shapes["64x2048"] == [(0.0, 2048, 128)] * 64
    assert shapes["16x8192"] == [(0.0, 8192, 256)] * 16
    assert shapes["beside_131072"][-3:] == [(0.0, 1024, 600), (3.0, 131_072, 16), (4.0, 1024, 16)]
    for callers in plan.mixed().values():
        numbers = [turn.session for caller in callers for turn in caller.turns]
        assert len(set(numbers)) == len(numbers), "two prompts have the same tokens"


def test_poisson_arrivals_have_exponential_distances() -> None:
    times = plan.poisson(5.0, 2000.0, seed=1)
    distances = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) and times[-1] < 2000.0 and min(distances) > 0
    within = 4 / math.sqrt(len(times))  # at least four standard deviations
    assert statistics.fmean(distances) == pytest.approx(1 / 5.0, rel=within)
    for quarter in (0.25, 0.5, 0.75):
        below = sum(distance < -math.log(1 - quarter) / 5.0 for distance in distances) / len(distances)
        assert below == pytest.approx(quarter, abs=within)
    assert plan.poisson(5.0, 10.0, seed=2) == plan.poisson(5.0, 10.0, seed=2)


def test_agents_hold_sessions_in_turn_without_end() -> None:
    held = [[prompt(0, 64 * n + 64, 2) for _ in range(n + 1)] for n in range(3)]
    first, second = plan.agents(held, 2)
    # Caller 0 holds sessions 0, 2, 4, …; there are three, so 4 is session 1 again, with other tokens.
    assert [(t.session, t.tokens) for t in islice(first.turns, 6)] == [
        (0, 64), (2, 192), (2, 192), (2, 192), (4, 128), (4, 128)
    ]  # fmt: skip
    assert [(t.session, t.tokens) for t in islice(second.turns, 3)] == [(1, 128), (1, 128), (3, 64)]


def test_poisson_sessions_keep_their_turns_and_their_own_tokens() -> None:
    callers = plan.arriving([[prompt(0, 64, 2), prompt(0, 128, 2)]], 10.0, 5.0, seed=3)
    assert [caller.start_s for caller in callers] == plan.poisson(10.0, 5.0, seed=3)
    numbers = [[(turn.session, turn.tokens) for turn in caller.turns] for caller in callers]
    assert numbers == [[(n, 64), (n, 128)] for n in range(len(callers))]


def test_shrinking_keeps_shared_prefixes() -> None:
    turns = [Turn(0, range(10), 600, 40), Turn(0, range(20), 1200, 40)]
    (caller,) = plan.shrunk([Caller(1.5, turns)], 4)
    small, large = caller.turns
    assert (caller.start_s, small.tokens, large.tokens, small.answer) == (1.5, 150, 300, 10)
    assert ids(large)[:150] == ids(small)


# --- sessions ----------------------------------------------------------------------------------------------


def request(tokens: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"t": 0.0, "type": "n", "in": tokens, "out": 500, "hash_ids": blocks, "think_time": 9.0, **more}


def trace(*requests: dict[str, Any], block_size: int = BLOCK) -> str:
    return json.dumps({"id": "a", "block_size": block_size, "requests": requests})


def test_reads_traces_from_a_folder_or_lines_of_a_file(tmp_path: Path) -> None:
    subagent = {"t": 1.0, "type": "subagent", "requests": []}
    one = trace(
        request(150, [1, 2]), subagent, request(250, [1, 2, 3], think_time=0.5), request(900, [*range(14)])
    )
    two = trace(request(70, [1]))
    (tmp_path / "a.json").write_text(one)
    (tmp_path / "b.json").write_text(two)
    (tmp_path / "both.jsonl").write_text(f"{one}\n\n{two}\n")
    read = sessions.read(tmp_path, Bounds(tokens=800))
    assert read == sessions.read(tmp_path / "both.jsonl", Bounds(tokens=800))
    assert [[turn.tokens for turn in session] for session in read] == [[150, 250], [70]]
    first, later = read[0]
    assert (first.think_s, later.think_s, first.answer, later.part) == (0.0, 0.5, 256, "later_turn")
    assert ids(later)[:128] == ids(first)[:128] and ids(later)[128:150] != ids(first)[128:150]
    assert len(ids(later)) == 250


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"bad.jsonl:1 is no session"),
        (json.dumps({"block_size": 64}), "requests"),
        (trace(request(70, [1]), block_size=16), "block_size 16"),
        (trace(request(5000, [1])), "no session begins with a prompt of at most 800 tokens"),
    ],
)
def test_refuses_traces_without_a_usable_session(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        sessions.read(tmp_path / "bad.jsonl", Bounds(tokens=800))


def test_generated_sessions_grow_within_bounds() -> None:
    bounds = Bounds(turns=8, tokens=60_000, answer=200, think_s=2.0)
    made = sessions.generated(40, 5, bounds)
    assert made == sessions.generated(40, 5, bounds) and made != sessions.generated(40, 6, bounds)
    assert len(made) == 40 and any(len(session) == 8 for session in made)
    for session in made:
        lengths = [turn.tokens for turn in session]
        assert lengths == sorted(set(lengths)) and lengths[0] >= 8000 and lengths[-1] <= 60_000
        assert [turn.part for turn in session] == ["first_turn"] + ["later_turn"] * (len(session) - 1)
        assert all(16 <= turn.answer <= 200 and 0 <= turn.think_s <= 2.0 for turn in session)
    grown = max(made, key=len)
    assert ids(grown[1])[: grown[0].tokens] == ids(grown[0])


# --- summaries ---------------------------------------------------------------------------------------------


@given(st.lists(SECONDS, min_size=1), st.floats(0.01, 1.0))
def test_quantile_is_the_smallest_value_that_covers_the_share(values: list[float], share: float) -> None:
    found = quantile(sorted(values), share)
    needed = math.ceil(share * len(values))
    assert found == min(v for v in values if sum(other <= v for other in values) >= needed)


def test_goodput_needs_both_limits_and_a_whole_answer() -> None:
    draw, limits = random.Random(4), Limits(ttft_s=1.0, gap_s=0.05)
    for _ in range(300):
        now, arrivals = draw.uniform(0, 1), []
        for _ in range(draw.randrange(30)):
            now += draw.choice([0.01, 0.02, 0.02, 0.08])
            arrivals.append(now)
        one = answer(draw.uniform(-0.6, 0.0), arrivals, done_s=draw.choice([0.0, now]))
        slow = sum(b - a > 0.05 for a, b in pairwise(arrivals))
        few = (
            slow <= (len(arrivals) - 1) - math.ceil(0.95 * (len(arrivals) - 1)) if len(arrivals) > 1 else True
        )
        wanted = bool(one.done_s) and bool(arrivals) and arrivals[0] - one.due_s <= 1.0 and few
        assert good(one, limits) == wanted


def test_gaps_overlapping_another_prompts_prefill_are_counted() -> None:
    one = answer(0.0, [1.0, 2.0, 3.0, 4.5, 9.0])
    for begin, end in [(0.0, 10.0), (2.0, 3.0), (2.5, 2.6), (5.0, 6.0), (9.5, 10.0)]:
        times = [begin + (end - begin) * n / 997 for n in range(1, 997)]
        pairs = list(zip(one.arrivals_s, one.arrivals_s[1:], strict=False))
        wanted = [b - a for a, b in pairs if any(a < time < b for time in times)]
        assert gaps_during([one], begin, end) == wanted


def test_summary_counts_only_finished_work_as_done() -> None:
    answers = [
        answer(0.0, [1.0, 1.1, 1.3], cached=5, expected_s=0.5),
        answer(1.0, [3.0, 3.1], cached=0),
        answer(2.0, [4.0], done_s=0.0),
        answer(2.0, [], error="refused", retries=2),
    ]
    row = summary(answers, 4.0)
    assert (row["requests_done"], row["requests_failed"], row["requests_unfinished"]) == (2, 1, 1)
    assert (row["prompt_tokens"], row["cached_share"], row["retries"]) == (20, 0.25, 2)
    assert (row["answer_tokens"], row["answer_tokens_per_s"]) == (6, 1.5)
    assert (row["ttft_p50_s"], row["ttft_p99_s"], row["gap_max_ms"]) == (2.0, 2.0, 200.0)
    assert (row["answer_p50_s"], row["answer_p99_s"], row["expected_off_p90"]) == (1.3, 2.1, 0.5)
    assert "gap_p50_ms" not in summary([], 1.0) and summary([], 1.0)["cached_share"] is None


def test_report_has_each_part_and_chat_gaps_during_a_long_prefill() -> None:
    answers = [
        answer(0.0, [1.0, 1.1, 3.1, 3.2], part="chat"),
        answer(2.0, [3.0], part="long"),
        answer(2.5, [9.0], part="late"),
    ]
    row = report(Played(answers, 10.0, [0.001, 0.002], 0.25), Limits())
    assert row["while_long_is_read"]["gap_p50_ms"] == pytest.approx(2000.0)
    assert (row["parts"]["long"]["ttft_p50_s"], row["parts"]["late"]["ttft_p50_s"]) == (1.0, 6.5)
    assert (row["good_share"], row["goodput_per_s"]) == (0.3333, 0.1)
    assert (row["client_lag_max_ms"], row["client_cpu"]) == (2.0, 0.25)


def test_row_has_the_median_of_each_number_over_the_runs() -> None:
    runs = [{"a": n, "cached": None if n == 1 else n, "parts": {"x": {"b": 10 * n}}} for n in (3, 1, 2)]
    assert medians(runs) == {"a": 2, "cached": 2.5, "parts": {"x": {"b": 20}}}
    assert medians([{"a": None}]) == {"a": None}


def test_new_row_replaces_the_one_of_its_server_and_load() -> None:
    rows = merged([], {"server": "vllm", "load": "agents", "n": 1})
    rows = merged(rows, {"server": "deltafront", "load": "agents", "n": 2})
    rows = merged(rows, {"server": "vllm", "load": "agents", "n": 3})
    assert [(row["server"], row["n"]) for row in rows] == [("deltafront", 2), ("vllm", 3)]


def test_request_body_is_json_with_the_planned_tokens() -> None:
    turn = prompt(1, 100, 7)
    body = json.loads(Bodies("m", 1000, 5, {"method": "dpxa"}).body(turn))
    assert body["prompt"] == ids(turn, seed=5)
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["method"]) == ("m", 7, True, "dpxa")


def test_plot_without_a_result_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--server", "a", "--plot", "b.svg"])
    assert "--result" in capsys.readouterr().err
