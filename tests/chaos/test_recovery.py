"""Measures a client's wait when a process dies or hangs, and the pages that a dead door leaves."""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP, Signals

import grpc
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.client import DeltafrontError, Token
from deltafront.workers.replica import HEAD_PATIENCE_S

from .checks import longest_wait
from .conftest import Amount, Record
from .running import PATIENCE_S, Service
from .schedule import Kind, prompt

WITH_SPARE_S, WITHOUT_S, PAGES_S, NOTICE_S = 3.0, 12.0, 10.0, 5.0
_KINDS = (Kind.STAGE, Kind.DECODE, Kind.RANK, Kind.CONTROLLER)
_DECODE = (Kind.DECODE, Kind.RANK, Kind.DECODE_OWNER)
_OWNERS = (Kind.GROUP_OWNER, Kind.DECODE_OWNER)
"""Serve's replicas, whose group or worker dies with them. About half of the killed ones own a worker that is
in use."""
_CLIENTS = 4
_ALONE = 3
"""Concurrent clients that fit one decode worker."""


class Trials:
    """Repeated measurements in seconds, each of which must be within a bound."""

    def __init__(self, service: Service, amount: Amount, record: Record) -> None:
        self._service, self._amount, self._record = service, amount, record
        self.draw = random.Random(amount.seed)

    def pauses(self, case: str, bound_s: float, kinds: Sequence[Kind], clients: int) -> None:
        """Measure the longest pauses of clients while processes of these kinds are killed in turn."""
        noticed: list[float] = []

        def once(number: int) -> float | None:
            found = pause(self._service, kinds[number % len(kinds)], SIGKILL, clients)
            noticed.extend([] if found is None else [found.noticed])
            return None if found is None else found.longest

        self.run(case, 12, bound_s, once, lambda: f"noticed after {statistics.median(noticed):.1f} s")

    def run(
        self,
        case: str,
        tries: int,
        bound_s: float,
        once: Callable[[int], float | None],
        more: Callable[[], str] = str,
    ) -> None:
        """Run the tries and record them in a row, even if the run is interrupted. None does not count as a
        try. more: added to the row's note."""
        seconds: list[float] = []
        until = time.monotonic() + self._amount.budget_s
        try:
            with self._service.client() as client:
                while len(seconds) < (self._amount.tries or tries) and time.monotonic() < until:
                    self._service.seconds_to_whole(client)
                    found = once(len(seconds))
                    print(f"{case}: {found} s", flush=True)
                    seconds += [] if found is None else [found]
        finally:
            if seconds:
                median, most = statistics.median(seconds), max(seconds)
                note = f"bad: over {bound_s:.1f} s; median {median:.1f} s, most {most:.1f} s"
                note = "; ".join(filter(None, (note, more(), f"load {os.getloadavg()[1]:.0f}")))
                self._record(case, len(seconds), sum(one > bound_s for one in seconds), note)
        assert max(seconds) <= bound_s


@pytest.fixture
def trials(service: Service, amount: Amount, record: Record) -> Trials:
    return Trials(service, amount, record)


@dataclass(frozen=True)
class Pause:
    """A pause in seconds. longest: a client's longest wait for an event. noticed: until a door used another
    worker."""

    longest: float
    noticed: float


def pause(service: Service, kind: Kind, sign: Signals, clients: int) -> Pause | None:
    """Send a signal to the busiest process of a kind, and measure the pause of clients with long prompts.

    Prompts skip the prefix cache, so that workers prefill them. Returns infinity if a request fails, and None
    if the process did nothing for the requests.
    """
    begun, killed, before = threading.Event(), math.inf, seconds_of(service, kind)

    def ask(number: int) -> float:
        heard: list[float] = []
        text = prompt(2 * number + 1)
        with service.client() as client:
            events = client.generate(text, max_tokens=60, ignore_eos=True, method="dense", skip_cache=True)
            for event in events:
                heard.append(time.monotonic())
                if number == 0 and (kind not in _DECODE or isinstance(event, Token)):
                    begun.set()
        return longest_wait(heard, killed)

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ask, number) for number in range(clients)]
        assert begun.wait(PATIENCE_S), "nobody hears anything"
        spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in seconds_of(service, kind).items()}
        killed, since = time.monotonic(), time.time()
        os.kill(max(spent, key=lambda pid: spent[pid]), sign)
        try:
            longest = max(one.result(PATIENCE_S) for one in asked)
        except (DeltafrontError, TimeoutError) as error:
            print(error)
            longest = math.inf
    noticed = service.tried_again(since)
    print(f"{kind.name}: longest pause {longest:.2f} s, doors tried again after {noticed}", flush=True)
    if not noticed:
        return None if longest < math.inf else Pause(longest, math.inf)
    return Pause(longest, noticed[0])


def seconds_of(service: Service, kind: Kind) -> dict[int, float]:
    """Return the CPU seconds of every process of a kind."""
    return {one.pid: sum(one.cpu_times()[:2]) for one in service.processes()[kind]}


@pytest.mark.timeout(24 * 3600)
def test_recovery_pause_is_short_with_a_spare_worker(trials: Trials) -> None:
    """Another worker of each role is idle."""
    trials.pauses("recovery_spare", WITH_SPARE_S, _KINDS, clients=1)


@pytest.mark.timeout(24 * 3600)
def test_recovery_pause_is_short_with_a_spare_when_a_ray_owner_dies(trials: Trials) -> None:
    trials.pauses("recovery_owner_spare", WITH_SPARE_S, _OWNERS, clients=1)


@pytest.mark.timeout(24 * 3600)
def test_recovery_pause_is_bounded_if_the_other_workers_are_busy(trials: Trials) -> None:
    """The other workers are busy, too, so the pause includes queueing."""
    trials.pauses("recovery_busy", WITHOUT_S, _KINDS, _CLIENTS)


@pytest.mark.timeout(24 * 3600)
def test_hung_stage_is_noticed_in_time(service: Service, trials: Trials) -> None:
    """The bound is two chunk times and 5 s, and the request finishes."""

    def once(_number: int) -> float | None:
        found = pause(service, Kind.STAGE, SIGSTOP, clients=1)
        return None if found is None else found.noticed if found.longest < math.inf else math.inf

    trials.run("sigstop", 10, NOTICE_S + 2 * service.chunk_seconds(), once)


@pytest.mark.timeout(24 * 3600)
def test_hung_rank_is_noticed_and_its_requests_finish_elsewhere(service: Service, trials: Trials) -> None:
    """The other ranks wait for the hung one. Their replica ends all of them."""

    def once(_number: int) -> float | None:
        found = pause(service, Kind.RANK, SIGSTOP, clients=1)
        return None if found is None else found.noticed if found.longest < math.inf else math.inf

    trials.run("sigstop_rank", 6, HEAD_PATIENCE_S + NOTICE_S, once)


@pytest.mark.timeout(24 * 3600)
def test_dead_api_servers_requests_free_their_pages(service: Service, trials: Trials) -> None:
    """Clients of the other door disconnect then, so the remaining pages are the dead door's."""

    def once(_number: int) -> float:
        with service.client() as client:
            with endless(service, 6):
                os.kill(trials.draw.choice(service.processes()[Kind.DOOR]).pid, SIGKILL)
            killed = time.monotonic()
            service.seconds_to_no_page(client)
        return time.monotonic() - killed

    trials.run("door_death_pages", 10, PAGES_S, once)


@contextlib.contextmanager
def endless(service: Service, clients: int) -> Iterator[None]:
    """Start clients that never retry. Each has an endless answer in progress, and its prompt as a session."""
    streams, channels = [], []
    for _ in range(clients):
        channel = grpc.insecure_channel(service.address, [("grpc.use_local_subchannel_pool", 1)])
        channels.append(channel)
        stub = pb_grpc.DeltafrontServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(
            prompt=pb.Prompt(text=prompt(0)), sampling=pb.SamplingOptions(max_tokens=10_000, ignore_eos=True)
        )
        request.session_ttl.FromSeconds(600)
        streams.append(stub.Generate(request))
    for stream in streams:
        while next(stream).WhichOneof("event") != "token":
            pass
    yield
    for stream in streams:
        stream.cancel()
    for channel in channels:
        channel.close()


@pytest.mark.timeout(24 * 3600)
def test_recovery_pause_is_bounded_without_a_spare_worker(
    alone: Service, amount: Amount, record: Record
) -> None:
    trials = Trials(alone, amount, record)
    trials.pauses("recovery_no_spare", WITHOUT_S, _KINDS, _ALONE)


@pytest.mark.timeout(24 * 3600)
def test_recovery_is_bounded_without_a_spare_when_a_ray_owner_dies(
    alone: Service, amount: Amount, record: Record
) -> None:
    trials = Trials(alone, amount, record)
    trials.pauses("recovery_owner_no_spare", WITHOUT_S, _OWNERS, _ALONE)
