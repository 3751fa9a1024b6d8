"""If a stage is killed, its prompt resumes instead of starting over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from deltafront.service.client import DeltafrontClient, GenerateFinished, Progress, Token
from deltafront.service.local.server_process import LocalService

from .conftest import Haystack, Sizes, Table
from .test_measured import scrape, total
from .wire import Wire

STAGES = 2
"""The number of stages in service.yaml."""
TRIES = 5
READ_AGAIN = "deltafront_tokens_read_again_total"


@pytest.fixture
def client(service: LocalService) -> Iterator[DeltafrontClient]:
    with DeltafrontClient(service.address) as client:
        yield client


def stages(service: LocalService) -> list[int]:
    """Process ids of the group's stages."""
    found = []
    for process in psutil.Process(service.pid).children(recursive=True):
        try:
            if "ray::StageActor" in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return sorted(found)


def test_killed_stage_costs_only_the_chunks_in_flight(
    service: LocalService,
    client: DeltafrontClient,
    wire: Wire,
    haystack: Haystack,
    sizes: Sizes,
    table: Table,
) -> None:
    """There is no spare group: the only one replaces its stage and resumes with the decode worker's KV.
    Chunks in flight count as prefilled twice.

    If the kill comes after prefill, as on a busy machine, try again.
    """
    long = sizes.document > 8 * sizes.chunk * STAGES
    kill_at = 0.8 if long else 0.2

    silence = 0.0

    def answer(kill: bool) -> tuple[list[int], GenerateFinished]:
        nonlocal silence
        ids, done, killed = [], [0], not kill
        last = time.monotonic()
        for event in client.generate(haystack.text, max_tokens=16, ignore_eos=True, skip_cache=True):
            if kill and killed:
                silence = max(silence, time.monotonic() - last)
            last = time.monotonic()
            if isinstance(event, Progress) and not event.expected_first_token_seconds:
                done.append(event.tokens_done)
                assert done[-1] > done[-2], "progress goes forward"
                if not killed and event.tokens_done >= kill_at * event.tokens_total:
                    os.kill(stages(service)[-1], signal.SIGKILL)
                    killed = True
            elif isinstance(event, Token):
                assert event.index == len(ids)
                ids.append(event.token_id)
            elif isinstance(event, GenerateFinished):
                finish = event
        assert killed
        return ids, finish

    alone, undisturbed = answer(kill=False)
    before = total(scrape(wire), READ_AGAIN)
    for _ in range(TRIES):
        ids, finish = answer(kill=True)
        assert ids == alone
        if finish.timings.parts.get("replay"):
            break
    assert finish.density.layers == pytest.approx(undisturbed.density.layers)
    assert finish.timings.parts["replay"] > 0
    assert sum(finish.timings.parts.values()) == pytest.approx(finish.timings.ttft_seconds)
    again = total(scrape(wire), READ_AGAIN) - before
    table.add("longest silence after a stage's death, without a spare, s", round(silence, 2))
    under_way = STAGES * sizes.chunk
    assert again <= under_way, "what was read had arrived, but for what was still on its way"
    if long:  # in a short prompt two chunks are half of it
        share = (again + under_way) / haystack.tokens
        table.add("of a prompt whose stage was killed at 80%, read twice", round(share, 2))
        assert share < 0.4
    wire.seconds_to_no_page()
