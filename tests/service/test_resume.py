"""If a prefill group dies, another group resumes its prompt after the last chunk that arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient, PrefillFinished, Progress
from deltafront.service.request.run import prompt_prefill
from deltafront.tests.states import prefill_report
from deltafront.workers.messages.events import LayerDensity, PrefillReport
from deltafront.workers.messages.requests import PrefillJob, RefusalReason, Refused

from .fakes import FakeGroup
from .inprocess import House
from .test_faults import counter
from .test_requests import collect, expected, ids, nothing_left

pytestmark = pytest.mark.usefixtures("impatient")
PROMPT = "p" * 700
TOTAL = 701
"""Tokens of the prompt: six chunks."""


def dying_and_spare(house: House, chunks: int) -> tuple[FakeGroup, FakeGroup]:
    """Make two groups. The first dies after this number of chunks."""
    dying = house.cut("group")
    dying.cut_after = chunks
    return dying.worker, house.add_group("prefill:g1")


def furthest(progress: list[Progress]) -> list[int]:
    return [event.tokens_done for event in progress]


@pytest.mark.parametrize("chunks", [0, 1, 3, 5])
def test_next_group_resumes_in_the_same_reservation(
    house: House, client: DeltafrontClient, chunks: int
) -> None:
    first, spare = dying_and_spare(house, chunks)
    text, _, finish, progress = collect(client.generate(PROMPT, max_tokens=9))
    assert text == expected(ids(PROMPT), 9)
    (job,) = spare.jobs
    assert job.start == 128 * chunks
    assert (job.request_id, job.token_ids) == (first.jobs[0].request_id, ids(PROMPT))
    assert len(house.decode.reservations) == 1, "one reservation"
    assert furthest(progress) == [128, 256, 384, 512, 640, TOTAL], "each once, in order"
    assert finish.timings.parts["replay"] > 0
    assert sum(finish.timings.parts.values()) == pytest.approx(finish.timings.ttft_seconds)
    assert counter(house, "deltafront_replays_total") == 1
    nothing_left(house)


@pytest.mark.parametrize("deaths", [(), (2,), (4,), (1, 2)])
def test_report_after_a_resume_counts_each_chunk_once(
    house: House, client: DeltafrontClient, deaths: tuple[int, ...]
) -> None:
    """The density is the whole prompt's; bytes and tokens of each chunk count once."""
    house.group.fail_after = list(deaths)
    _, _, finish, _ = collect(client.generate(PROMPT, max_tokens=3))
    assert finish.density.layers == {0: 1.0, 1: pytest.approx(0.5)}
    assert finish.density.mean == pytest.approx(0.75)
    assert finish.density.sampled_share == pytest.approx(0.016)
    assert counter(house, "deltafront_handoff_bytes_total") == 100 * TOTAL
    assert counter(house, "deltafront_request_prompt_tokens_sum") == TOTAL
    assert counter(house, "deltafront_request_prefill_time_seconds_count") == 1
    assert [job.start for job in house.group.jobs] == [128 * sum(deaths[:n]) for n in range(len(deaths) + 1)]
    assert [job.attempt for job in house.group.jobs] == list(range(len(deaths) + 1))
    nothing_left(house)


def test_resume_prefills_kv_again_that_had_not_arrived(house: House, client: DeltafrontClient) -> None:
    """The reported progress does not decrease."""
    _, spare = dying_and_spare(house, 5)
    house.decode.arrived = 300
    text, _, finish, progress = collect(client.generate(PROMPT, max_tokens=9))
    assert text == expected(ids(PROMPT), 9)
    assert spare.jobs[0].start == 256
    assert furthest(progress) == [128, 256, 384, 512, 640, TOTAL]
    assert finish.density.mean == pytest.approx(0.75)
    assert counter(house, "deltafront_handoff_bytes_total") == 100 * TOTAL


def test_group_resumes_its_own_prompt_if_there_is_no_other_group(
    house: House, client: DeltafrontClient
) -> None:
    house.group.fail_after = [4]
    text, *_ = collect(client.generate(PROMPT, max_tokens=5))
    assert text == expected(ids(PROMPT), 5)
    assert house.group.chunks_read == [128, 256, 384, 512, 640, TOTAL]
    nothing_left(house)


def test_group_death_after_the_last_chunk_repeats_the_chunk(house: House, client: DeltafrontClient) -> None:
    """The chunk's logits may not have arrived."""
    _, spare = dying_and_spare(house, 6)
    text, *_ = collect(client.generate(PROMPT, max_tokens=5))
    assert text == expected(ids(PROMPT), 5)
    assert spare.jobs[0].start == 640


def test_group_that_still_holds_a_resumed_request_is_cancelled(
    house: House, client: DeltafrontClient
) -> None:
    house.group.fail_after = [4]
    stream = client.generate(PROMPT, max_tokens=5)
    house.group.pause_at = 3
    events = [next(stream) for _ in range(3)]
    house.group.busy = [Refused(reason=RefusalReason.DUPLICATE, message="it is already running here")]
    house.group.pause_at = -1
    text, *_ = collect([*events, *stream])
    assert text == expected(ids(PROMPT), 5)
    assert house.group.cancelled == [house.group.jobs[0].request_id]
    assert [job.start for job in house.group.jobs] == [0, 512, 512]
    nothing_left(house)


def test_next_prefill_group_may_have_another_number_of_stages(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens while the configuration changes."""
    _, spare = dying_and_spare(house, 3)
    report = spare._report

    def twice(job: PrefillJob, done: int, wall: float) -> PrefillReport:
        made = report(job, done, wall)
        return replace(made, stages=made.stages * 2)

    monkeypatch.setattr(spare, "_report", twice)
    text, _, finish, _ = collect(client.generate(PROMPT, max_tokens=9))
    assert text == expected(ids(PROMPT), 9)
    assert len(finish.timings.stages) == 2 * len(report(spare.jobs[0], 128, 1.0).stages)


def test_prefill_only_request_resumes_after_a_group_death(house: House, client: DeltafrontClient) -> None:
    _, spare = dying_and_spare(house, 4)
    *progress, made = client.prefill(PROMPT)
    assert isinstance(made, PrefillFinished)
    assert spare.jobs[0].start == 512 and not spare.jobs[0].wants_logits
    assert [event.tokens_done for event in progress if isinstance(event, Progress)][-1] == TOTAL
    assert made.density.mean == pytest.approx(0.75)
    client.release(made.session.session_id)
    nothing_left(house)


@pytest.mark.parametrize(("options", "start"), [({"gamma": 64}, 512), ({"gamma": 192}, 384)])
def test_resumed_delta_correction_starts_at_a_dense_row(
    house: House, client: DeltafrontClient, options: dict[str, Any], start: int
) -> None:
    _, spare = dying_and_spare(house, 4)
    text, *_ = collect(client.generate(PROMPT, max_tokens=5, method="dense+delta", options=options))
    assert text == expected(ids(PROMPT), 5)
    assert spare.jobs[0].start == start


def test_method_that_cannot_resume_restarts_in_its_reservation(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_prefill, "resume_step", lambda _method: 0)
    _, spare = dying_and_spare(house, 4)
    text, _, finish, progress = collect(client.generate(PROMPT, max_tokens=5))
    assert text == expected(ids(PROMPT), 5)
    assert spare.jobs[0].start == 0 and len(house.decode.reservations) == 1
    assert furthest(progress) == [128, 256, 384, 512, 640, TOTAL]
    assert finish.density.mean == pytest.approx(0.75)
    assert counter(house, "deltafront_handoff_bytes_total") == 100 * TOTAL


def test_request_restarts_if_its_reservation_is_lost_too(
    make_house: Callable[..., House],
) -> None:
    """The group did not fail: without a poll it must still be known."""
    house = make_house(refresh_s=3600)
    lost, house.group.fail_after = house.cut("decode"), [3]
    house.add_decode("decode:d1").total = 2000
    house.loop.run(house.fleet.refresh())
    house.group.pause_at = 2
    with DeltafrontClient(house.address) as client:
        stream = client.generate(PROMPT, max_tokens=5)
        events = [next(stream), next(stream)]
        lost.cut, house.group.pause_at = True, -1
        text, *_ = collect([*events, *stream])
    assert text == expected(ids(PROMPT), 5)
    assert [job.start for job in house.group.jobs] == [0, 0]
    assert [job.decode_worker for job in house.group.jobs] == ["decode:d0", "decode:d1"]
    assert counter(house, "deltafront_replays_total") == 1


def report(read: int, computed: float, **more: Any) -> PrefillReport:
    given: dict[str, Any] = {
        "queue": 1.0,
        "wall": 2.0,
        "critical": {"attention": 1.5, "group_overhead": 0.5},
        "stages": ({"attention": 1.5}, {"attention": 1.0}),
        "density": (LayerDensity(layer=0, computed=computed, causal=read),),
        "sampled_share": 0.1,
        "handoff_bytes": read,
    }
    return prefill_report(**given | more)


def test_merges_reports_of_two_attempts() -> None:
    both = prompt_prefill.merge_reports(
        report(100, 50.0),
        report(
            300,
            30.0,
            critical={"attention": 1.0, "queue_of_others": 1.0},
            stages=({"attention": 2.0}, {"kv_write": 1.0}),
            density=(
                LayerDensity(layer=0, computed=30.0, causal=300),
                LayerDensity(layer=1, computed=1.0, causal=100),
            ),
            sampled_share=0.2,
            launch_bound=(0.25, 0.5),
        ),
    )
    assert both.launch_bound == (0.25, 0.5), "of the group before nothing is known"
    twice = prompt_prefill.merge_reports(both, replace(both, launch_bound=(1.0, 2.0, 4.0)))
    assert twice.launch_bound == (1.25, 2.5, 4.0)
    assert (both.queue, both.wall, both.handoff_bytes) == (2.0, 4.0, 400)
    assert both.critical == {"attention": 2.5, "group_overhead": 0.5, "queue_of_others": 1.0}
    assert both.stages == ({"attention": 3.5}, {"attention": 1.0, "kv_write": 1.0})
    assert both.density == (
        LayerDensity(layer=0, computed=80.0, causal=400),
        LayerDensity(layer=1, computed=1.0, causal=100),
    )
    assert both.sampled_share == pytest.approx((0.1 * 100 + 0.2 * 400) / 500)
