"""A door's counters of requests and gauges of workers. Sums and ports are tested in test_parts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient, GenerateFinished, PrefillFinished
from deltafront.service.fleet.worker_gauges import WorkerState, state_of
from deltafront.service.metrics import FINISHED, RPCS, Metrics, ShadowOutcome
from deltafront.tests.states import decode_stats, group_stats, prefill_report
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.stages import HandoffFailed
from deltafront.workers.messages.states import TierStats

from ..test_generated import declared
from .inprocess import House, wait_until
from .test_requests import collect

pytestmark = pytest.mark.usefixtures("impatient")
PROMPT = "p" * 700


def value(house: House, name: str, **labels: str) -> float:
    """Sum the samples with these labels."""
    found = [
        sample.value
        for metric in house.metrics.registry().collect()
        for sample in metric.samples
        if sample.name == f"deltafront_{name}" and labels.items() <= sample.labels.items()
    ]
    assert found, f"no series {name} {labels}"
    return sum(found)


def ended(house: House, requests: int) -> None:
    """Wait until this number of requests is counted, which happens after their streams end."""
    wait_until(
        lambda: value(house, "requests_total", outcome=FINISHED) == requests, "a request was not counted"
    )


def test_each_metric_counts_an_answer_once(house: House, client: DeltafrontClient) -> None:
    _, tokens, finish, _ = collect(client.generate(PROMPT, max_tokens=9, method="dense"))
    ended(house, 1)
    read = finish.usage.prompt_tokens
    assert value(house, "request_generation_tokens_sum") == len(tokens) == 9
    assert value(house, "request_time_per_output_token_seconds_count") == 1
    mean = value(house, "request_time_per_output_token_seconds_sum")
    assert mean == pytest.approx(value(house, "inter_token_latency_seconds_sum") / 8)
    assert value(house, "finish_reasons_total", reason="length") == 1
    assert value(house, "finish_reasons_total") == 1, "the others are there, and 0"
    assert value(house, "prefill_prompts_total", method="dense") == 1
    assert value(house, "prefill_tokens_total", method="dense") == read
    assert value(house, "time_to_first_token_seconds_count", prompt="1K") == 1
    assert value(house, "attention_tiles_computed_total", method="dense", layer="1") == 5
    assert value(house, "attention_tiles_causal_total", method="dense") == 20
    rows, steps = value(house, "decode_rows_total"), value(house, "decode_steps_total")
    assert rows / steps == 4, "the fake worker computes four at once"
    stages = [value(house, "stage_seconds_total", stage=stage, phase="attention") for stage in "01"]
    assert stages == [finish.timings.stages[0]["attention"]] * 2
    for phase, part in (("attention", "attention"), ("choosing", "scoring")):
        layers = [value(house, "attention_layer_seconds_total", phase=phase, layer=layer) for layer in "01"]
        assert layers == [finish.timings.stages[0][part]] * 2, "a layer is all that a stage has"


def test_ttft_metric_of_a_session_is_labelled_by_question_length(
    house: House, client: DeltafrontClient
) -> None:
    """The document's length has another label than the question's."""
    *_, made = client.prefill("x" * 3000, session_ttl_s=60)
    assert isinstance(made, PrefillFinished)
    collect(client.generate(session_id=made.session.session_id, append="Who?", max_tokens=1))
    ended(house, 2)
    assert value(house, "time_to_first_token_seconds_count", prompt="1K") == 1
    assert value(house, "time_to_first_token_seconds_count") == 1
    assert value(house, "cached_tokens_total") == made.usage.prompt_tokens
    assert value(house, "request_generation_tokens_count") == 1, "Prefill has no answer"
    assert value(house, "request_time_per_output_token_seconds_count") == 0, "nor one token a gap"


def failing_group(house: House) -> None:
    house.group.fail_after, house.group.failure = [2], HandoffFailed("K/V is lost")


def failing_worker(house: House) -> None:
    house.decode.fail_after, house.decode.failure = [0], FinishReason.NO_KV


def dying_group(house: House) -> None:
    house.group.fail_after = [2]


@pytest.mark.parametrize(("fail", "failures"), [(failing_group, 1), (failing_worker, 1), (dying_group, 0)])
def test_hand_offs_that_fail_are_counted(
    house: House, client: DeltafrontClient, fail: Callable[[House], None], failures: int
) -> None:
    """Either end may report the failure. A stage's death does not count."""
    fail(house)
    *_, finish = client.generate(PROMPT, max_tokens=3)
    assert isinstance(finish, GenerateFinished)
    assert value(house, "handoff_failures_total") == failures
    assert value(house, "replays_total") == 1


def test_scoring_to_attention_ratio_has_buckets_above_1(tmp_path: Path) -> None:
    """Panels show what to do for ratios above 1; without such buckets no quantile could be above 1."""
    metrics, stage = Metrics(tmp_path), {"attention": 1.0, "scoring": 2.5}
    metrics.observe_prefill(
        prefill_report(critical=stage, stages=(stage,)),
        1000,
    )
    samples = [s for m in metrics.registry().collect() for s in m.samples]
    name = "deltafront_scoring_overhead_ratio_bucket"
    buckets = {s.labels["le"]: s.value for s in samples if s.name == name}
    assert (buckets["1.0"], buckets["2.0"], buckets["3.0"]) == (0, 0, 1)


def test_launch_bound_time_is_exported_by_stage_and_method(tmp_path: Path) -> None:
    metrics, stage = Metrics(tmp_path), {"attention": 1.0}
    report = prefill_report(critical=stage, stages=(stage, stage), launch_bound=(0.5, 0.25))
    for _ in range(2):
        metrics.observe_prefill(report, 1000)
    samples = [s for m in metrics.registry().collect() for s in m.samples]
    name = "deltafront_stage_launch_bound_seconds_total"
    told = {(s.labels["stage"], s.labels["method"]): s.value for s in samples if s.name == name}
    assert told == {("0", "dpxa"): 1.0, ("1", "dpxa"): 0.5}


def promtool_says(exported: bytes) -> str:
    """Return the complaints of `promtool check metrics`; empty without any."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=exported, check=False, capture_output=True)
    return (done.stdout + done.stderr).decode()


def test_promtool_accepts_a_doors_metrics(house: House, client: DeltafrontClient) -> None:
    """Sends requests of every kind first, so that each declared metric has been observed."""
    *_, made = client.prefill("x" * 300, session_ttl_s=60)
    assert isinstance(made, PrefillFinished)
    collect(client.generate(session_id=made.session.session_id, append="Who?", max_tokens=3))
    collect(client.generate(PROMPT, max_tokens=3, method="dense"))
    ended(house, 3)
    on_a_gpu = prefill_report(stages=({"attention": 1.0},), launch_bound=(0.5,))
    house.metrics.observe_prefill(on_a_gpu, 1000)
    house.metrics.workers.update({"decode:x": WorkerState(usage=0.5, up=1)})
    house.metrics.workers.compiled("decode:x", (("warm_up", 40),))
    tier = TierStats(
        tier="host",
        room=90,
        pages=60,
        bytes_per_page=2048,
        evicted=3,
        evicted_retained=1,
        evicted_age_s=1.5,
        missed=1,
        back=20,
        back_s=0.5,
        states_evicted=4,
    )
    house.metrics.workers.tiered("decode:d0", (tier,))
    house.metrics.certificate("door", 1.8e9)
    house.metrics.measured("dpxa+delta", 0.98)
    house.metrics.count_shadow(ShadowOutcome.COMPARED)
    house.metrics.observe_shadow("dpxa", 40, 10.0, 11.5, 0.975)
    exported = house.metrics.expose()
    for name, expected in (
        ("back_pages", 20),
        ("evicted_pages", 3),
        ("evicted_retained_pages", 1),
        ("evicted_states", 4),
    ):
        assert value(house, f"kv_tier_{name}", worker="decode:d0", tier="host") == expected
    described = set(re.findall(rb"^# HELP deltafront_(\w+) \S", exported, re.MULTILINE))
    assert {name.decode() for name in described} == {name for _kind, name in declared()}
    assert promtool_says(exported) == ""


def test_metric_names_follow_prometheus_conventions() -> None:
    """Some versions of promtool do not check this."""
    for kind, name in declared():
        assert name.endswith("_total") == (kind == "counter"), name
        words = set(name.split("_"))
        assert not words & {
            "ms",
            "milliseconds",
            "us",
            "minutes",
            "hours",
            "kb",
            "mb",
            "gb",
            "gib",
            "percent",
        }


def test_every_outcome_counter_starts_at_zero(tmp_path: Path) -> None:
    """The first event then shows as an increase, and a share of no requests is 0."""
    samples = [s for m in Metrics(tmp_path).registry().collect() for s in m.samples]
    outcomes = {
        (s.labels["method_rpc"], s.labels["outcome"]): s.value
        for s in samples
        if s.name == "deltafront_requests_total"
    }
    assert {rpc for rpc, _ in outcomes} == set(RPCS) and len(outcomes) == 10 * len(RPCS)
    assert not any(outcomes.values())


def test_every_series_names_the_model(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, "Llama 3.1 8B")
    metrics.workers.update({"decode:x": WorkerState(usage=0.5, up=1)})
    samples = [s for m in metrics.registry().collect() for s in m.samples]
    assert samples and {s.labels["model_name"] for s in samples} == {"Llama 3.1 8B"}
    assert b'model_name="Llama 3.1 8B"' in metrics.expose()


STATES: dict[str, tuple[Any, WorkerState]] = {
    "group": (
        group_stats(pages_free=75, running=2, waiting=3, waiting_tokens=5000, tokens_per_second=250.0),
        WorkerState(0.25, 75, 100, 2, 3, queue_tokens=5000, tokens_per_second=250.0, up=1),
    ),
    "decode worker": (
        decode_stats(running=1, sessions=4, draining=True),
        WorkerState(0.0, 100, 100, 1, 0, sessions=4, up=1, draining=1),
    ),
    "nothing": (
        decode_stats(pages_total=0, pages_free=0),
        WorkerState(up=1),
    ),
}


@pytest.mark.parametrize("kind", STATES)
def test_worker_stats_become_gauges(kind: str) -> None:
    stats, state = STATES[kind]
    assert state_of(stats) == state


def test_compilations_are_exported_by_worker_and_phase(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for serving in (0, 2, 2):  # one poll after another
        metrics.workers.compiled("decode:x", (("warm_up", 40), ("serving", serving)))
    metrics.workers.compiled("prefill:y", ())
    text = metrics.expose().decode()
    told = re.findall(r"^deltafront_kernel_compilations\{(.*)\} (\S+)$", text, re.MULTILINE)
    assert sorted(told) == [
        ('phase="serving",worker="decode:x"', "2.0"),
        ('phase="warm_up",worker="decode:x"', "40.0"),
    ]
