"""Overload of one group and one decode worker: refusals come in time, and clients that retry as told are
answered."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from dataclasses import dataclass, field

import grpc
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.client import Token
from deltafront.service.door.status import PUSHBACK
from deltafront.service.errors import Overloaded

from .conftest import Amount, Record
from .running import Service
from .schedule import prompt

TIMES = 10
_TOKENS = 600
_ANSWER = 8
_CHANNELS = 8
_FAST_S = 0.1
_PATIENCE_S = 1800.0
"""Seconds of retries after which a client counts as never answered."""


@pytest.mark.timeout(24 * 3600)
def test_never_refuses_a_request_that_fits(alone: Service, amount: Amount, record: Record) -> None:
    """Requests run one after the other at alternating doors. Each takes more than half of the pages, and ends
    at a stop string."""
    tries, refused = amount.tries or 100, 0
    text = prompt(0)
    with alone.client() as client:
        info = client.info()
        over_half = info.page_tokens * (info.decode_pages_total // 2 + 1)
        shown = [
            event.text
            for event in client.generate(text, max_tokens=48, ignore_eos=True)
            if isinstance(event, Token)
        ]
    stop = next(letter for letter in "".join(shown[2:]) if letter.isascii() and letter.isprintable())
    for _ in range(tries):
        with alone.client() as client:
            try:
                list(client.generate(text, max_tokens=over_half - len(text), ignore_eos=True, stop=[stop]))
            except Overloaded as error:
                print(error)
                refused += 1
    total = info.page_tokens * info.decode_pages_total
    record("spurious_refusals", tries, refused, f"each takes {over_half} of {total} tokens")
    assert not refused


@dataclass
class Crowd:
    """The results of a burst. refused: clients that were refused at least once. waited: seconds from each
    client's first refusal to its answer."""

    refused: int = 0
    waited: list[float] = field(default_factory=list)
    answered: int = 0
    other: list[str] = field(default_factory=list)


class Burst:
    """Starts clients at an even rate for some seconds. Refused clients retry after the given time."""

    def __init__(self, service: Service, seed: int) -> None:
        self._draw = random.Random(seed)
        self._channels = [
            grpc.aio.insecure_channel(service.address, [("grpc.use_local_subchannel_pool", 1)])
            for _ in range(_CHANNELS)
        ]
        self.crowd = Crowd()

    async def run(self, rate: float, seconds: float) -> None:
        clients = []
        for _ in range(math.ceil(rate * seconds)):
            clients.append(asyncio.create_task(self._client()))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*clients)
        for channel in self._channels:
            await channel.close()

    async def rate(self, together: int, each: int) -> float:
        """Measure the requests per second of several clients, each of which sends one request after the
        other."""

        async def some() -> None:
            for _ in range(each):
                ids = self._ids()
                while (told := await self._ask(ids)) is not None:
                    await asyncio.sleep(told)

        started = time.monotonic()
        await asyncio.gather(*(some() for _ in range(together)))
        return together * each / (time.monotonic() - started)

    async def _client(self) -> None:
        """Send a prompt, and retry after the given times until it is answered or _PATIENCE_S has passed."""
        ids = self._ids()
        told = await self._ask(ids)
        if told is None:
            return
        self.crowd.refused += 1
        began = time.monotonic()
        while told is not None and time.monotonic() - began < _PATIENCE_S:
            await asyncio.sleep(told)
            told = await self._ask(ids)
        if told is None:
            self.crowd.waited.append(time.monotonic() - began)

    def _ids(self) -> bytes:
        """Make a prompt that no other client has."""
        return b"".join(self._draw.randrange(256).to_bytes(4, "little") for _ in range(_TOKENS))

    async def _ask(self, ids: bytes) -> float | None:
        """Send the prompt. Return None if it is answered, else the retry time in seconds."""
        stub = pb_grpc.DeltafrontServiceStub(self._draw.choice(self._channels))  # type: ignore[no-untyped-call]
        sampling = pb.SamplingOptions(max_tokens=_ANSWER, ignore_eos=True)
        stream = stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(token_ids=ids), sampling=sampling))
        try:
            async for _response in stream:
                pass
        except grpc.aio.AioRpcError as error:
            sent = dict(error.trailing_metadata() or ())
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and PUSHBACK in sent:
                return int(sent[PUSHBACK]) / 1000
            self.crowd.other.append(f"{error.code().name}: {error.details()}")
            return None
        self.crowd.answered += 1
        return None


def centile95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


@pytest.mark.timeout(24 * 3600)
def test_tenfold_overload_refuses_in_time_and_holds_no_page(
    alone: Service, amount: Amount, record: Record
) -> None:
    async def overload() -> tuple[Crowd, float]:
        warm = Burst(alone, amount.seed)
        rate = await warm.rate(together=4, each=5)
        burst = Burst(alone, amount.seed + 1)
        await burst.run(TIMES * rate, seconds=float(amount.tries or 5))
        return burst.crowd, rate

    before = len(alone.audits())
    crowd, rate = asyncio.run(overload())
    with alone.client() as client:
        alone.seconds_to_no_page(client)
    every = alone.audits()[before:]
    seconds = [one["seconds"] for one in every if one["finish"] == "resource_exhausted"]
    slow = sum(one >= _FAST_S for one in seconds)
    note = f"{TIMES} × {rate:.1f} requests a second, {crowd.answered} answered"
    late = f"median {statistics.median(seconds) * 1000:.0f}, 95% in {centile95(seconds) * 1000:.0f} ms"
    record("overload_refusal_ms", len(seconds), slow, f"bad: 100 ms or more at the server; {late}; {note}")
    waited = f"median {statistics.median(crowd.waited):.1f} s from the first refusal to the answer"
    unanswered = crowd.refused - len(crowd.waited)
    record("overload_comes_back", crowd.refused, unanswered, f"bad: never answered; {waited}; {note}")
    print(crowd.other)
    assert not crowd.other
    assert slow <= 0.05 * len(seconds)
    assert crowd.refused, "the burst was too small"
    assert not unanswered
