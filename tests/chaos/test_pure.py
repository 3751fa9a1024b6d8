"""The chaos suite itself: schedules follow from seeds, and checks detect errors."""

from __future__ import annotations

import random
from dataclasses import replace
from signal import SIGSTOP

from deltafront.protos.v1 import deltafront_pb2 as pb

from . import fuzz
from .checks import (
    Log,
    Reference,
    differs,
    inconsistent,
    longest_wait,
    lost,
    overfull,
    parse,
    unfilled,
)
from .growth import Sample, grown
from .schedule import Ask, Form, Kind, episode, prompt

SEEDS = range(300)
ASK = Ask(Form.GREEDY, 0, 3, 0)


def test_seed_determines_the_episode() -> None:
    assert episode(7, 6) == episode(7, 6) != episode(8, 6)
    assert prompt(3) == prompt(3) != prompt(5)


def test_episodes_draw_every_fault_but_never_kill_all_api_servers() -> None:
    drawn = [episode(seed, 6) for seed in SEEDS]
    faults = [fault for one in drawn for fault in one.faults]
    assert {fault.kind for fault in faults} == set(Kind)
    assert {ask.form for one in drawn for ask in one.asks} == set(Form)
    assert any(fault.signal == SIGSTOP for fault in faults)
    assert not any(
        fault.signal == SIGSTOP for seed in SEEDS for fault in episode(seed, 6, stops=False).faults
    )
    more = [episode(seed, 6, others=5) for seed in SEEDS]
    for one, others in [(one, 2) for one in drawn] + [(one, 5) for one in more]:
        doors = sum(fault.kind is Kind.DOOR for fault in one.faults)
        assert doors <= 1 and len(one.faults) - doors <= others and one.faults
        assert [fault.progress for fault in one.faults] == sorted(fault.progress for fault in one.faults)


def finished(ask: Ask = ASK, ids: tuple[int, ...] = (5, 6, 7)) -> Log:
    return Log(ask, list(range(len(ids))), list(ids), "abc"[: len(ids)], ["finished"], calls=1)


def test_longest_wait_starts_at_the_kill_or_the_previous_event() -> None:
    assert longest_wait([1.0, 9.0, 12.5, 13.0, 15.0], since=10.0) == 2.5
    assert longest_wait([11.0, 12.0, 15.0, 15.5], since=10.0) == 3.0
    assert longest_wait([14.0, 15.0], since=10.0) == 4.0, "nothing had come before"
    assert longest_wait([1.0, 9.0], since=10.0) == 0.0, "it had ended"


def test_detects_requests_that_do_not_end_exactly_once() -> None:
    good = finished()
    assert not lost(good)
    for changes in (
        {"ends": []},
        {"ends": ["finished"] * 2},
        {"ends": ["unavailable: no"]},
        {"indices": [0, 0, 1]},
    ):
        assert lost(replace(good, **changes)), changes
    assert lost(finished(ids=(5, 6))), "a token is missing"
    for form, end in ((Form.CANCEL, "cancelled"), (Form.LEAVE, "left")):
        log = replace(finished(replace(ASK, form=form), (5,)), ends=[end])
        assert not lost(log)
        assert lost(replace(log, ask=ASK))


def test_compares_each_answer_with_the_answer_without_faults() -> None:
    known = Reference((5, 6, 7, 8), ("a", "ab", "abc", "abcd"))
    for form in Form:
        assert not differs(finished(replace(ASK, form=form)), known)
    other = finished(ids=(5, 6, 9))
    assert differs(other, known)
    assert differs(replace(other, ask=replace(ASK, form=Form.SPARSE)), known)
    assert not differs(replace(other, ask=replace(ASK, form=Form.LEAVE)), known), "nobody asks"
    over_http = finished(replace(ASK, form=Form.HTTP))
    assert not differs(replace(over_http, text="abc\ufffd"), known), "the beginning of a character"
    for text in ("abd", "ab", "abcd"):
        assert differs(replace(over_http, text=text), known), text


EXPOSED = """# TYPE deltafront_requests_total counter
deltafront_requests_total{method_rpc="Generate",outcome="finished"} 2.0
deltafront_requests_total{method_rpc="Generate",outcome="cancelled"} 1.0
deltafront_e2e_request_latency_seconds_count{method_rpc="Generate"} 3.0
deltafront_num_requests_running{worker="decode:a b"} 0.0
"""


def test_detects_counters_that_contradict_what_clients_saw() -> None:
    left = replace(finished(replace(ASK, form=Form.LEAVE)), ends=["left"])
    logs = [finished(), finished(), left]
    after = parse(EXPOSED)
    assert not inconsistent({}, after, logs, 0)
    broken, ended = [*logs, replace(left, lost=1)], [replace(left, ends=["cancelled"])] * 2
    assert not inconsistent({}, after, broken, 1), "a stream of a door that died"
    assert not inconsistent({}, after, [*logs, left], 1), "the client may have left before that"
    assert inconsistent({}, after, broken, 0) == ["1 streams broke, and no door nor proxy died"]
    assert inconsistent({}, after, [*logs, *ended], 1) == ["5 streams, 0 of them broken, have 3 outcomes"]
    assert inconsistent({}, after, [*logs, left], 0) == ["4 streams, 0 of them broken, have 3 outcomes"]
    assert inconsistent({}, after, logs[:2], 0) == ["2 streams, 0 of them broken, have 3 outcomes"]
    assert inconsistent({}, after, [finished()] * 3, 0) == ["3 clients have an answer, 2 are counted"]
    untimed = {**after, 'deltafront_e2e_request_latency_seconds_count{method_rpc="Generate"}': 2.0}
    assert inconsistent({}, untimed, logs, 0) == ["3 outcomes, 2 times"]
    assert any("fell" in problem for problem in inconsistent(after, {}, [], 0))


TIER = """deltafront_kv_tier_room_pages{tier="disk",worker="a"} 9.0
deltafront_kv_tier_pages{tier="disk",worker="a"} 9.0
deltafront_kv_tier_evicted_pages{tier="disk",worker="a"} 3.0
"""


def test_detects_cache_tiers_that_never_filled_or_overflowed() -> None:
    assert not unfilled(parse(TIER)) and not overfull(parse(TIER))
    other = TIER.replace('"a"', '"b"')
    assert unfilled(parse(TIER + other.replace("} 3.0", "} 0.0"))) == [
        'deltafront_kv_tier_evicted_pages{tier="disk",worker="b"} 0'
    ]
    assert overfull(parse(TIER + other.replace("} 9.0\n", "} 8.0\n", 1)))


def test_detects_growing_memory_and_file_descriptors() -> None:
    def samples(resident: int, files: int) -> list[Sample]:
        return [
            Sample(1, "stage", at, (300 << 20) + at * resident, 40 + at * files)
            for at in map(float, range(30))
        ]  # type: ignore[arg-type]

    assert not grown(samples(0, 0), 0)
    assert not grown(samples(1 << 16, 0), 0), "within the bounds"
    assert grown(samples(2 << 20, 0), 0) == ["stage: 309 to 349 MiB"]
    assert grown(samples(0, 1), 0) == ["stage: 44.5 to 64.5 file descriptors"]
    assert not grown([sample for sample in samples(2 << 20, 0) if sample.at < 10], after=10), "warming up"


def test_every_field_of_every_request_is_fuzzed() -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        for method in fuzz.SERVICE.methods:
            made = fuzz.message(random.Random(seed), getattr(pb, method.input_type.name))
            seen |= {f"{method.input_type.name}.{one.name}" for one, _value in made.ListFields()}
    wanted = {f"{m.input_type.name}.{f.name}" for m in fuzz.SERVICE.methods for f in m.input_type.fields}
    assert seen == wanted
    assert fuzz.call(random.Random(3)) == fuzz.call(random.Random(3))
    wires = [fuzz.garbage(random.Random(seed), b"\x0a\x04text") for seed in SEEDS]
    assert len(set(wires)) > len(SEEDS) // 2
