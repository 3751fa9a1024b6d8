"""Measures what it costs to stream tokens from a decode worker's actor to a door: CPU time per token at both
ends, and the time per step that they reach together.

    python -m deltafront.benchmarks.token_streams --streams 1 8 64 --step-ms 9

No model runs: a stand-in for the worker gives every stream a token each --step-ms. Ray runs on this machine.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray

from deltafront.benchmarks.arguments import parser_of
from deltafront.workers.messages.events import Token
from deltafront.workers.remote import Failure, hosts, remote
from deltafront.workers.roles import DecodeWorker


class Ticking:
    """Stands in for a decode worker: `tick` gives each stream its next token."""

    def __init__(self) -> None:
        self._streams: list[asyncio.Queue[Token]] = []

    async def generate(self, tokens: int) -> AsyncIterator[Token]:
        own = asyncio.Queue[Token]()
        self._streams.append(own)
        for _ in range(tokens):
            yield await own.get()

    async def tick(self, streams: int, tokens: int, step_s: float) -> None:
        while len(self._streams) < streams:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        for index in range(tokens):
            await asyncio.sleep(max(0.0, began + (index + 1) * step_s - time.perf_counter()))
            for stream in self._streams:
                stream.put_nowait(Token(index=index, token_id=index, logprob=-1.0))
        self._streams = []


@hosts(DecodeWorker)
class TickingActor:
    def __init__(self) -> None:
        self.hosted: Any = Ticking()

    async def tick(self, *arguments: Any) -> None:
        await self.hosted.tick(*arguments)

    async def cpu_s(self) -> float:
        return cpu_s()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measured(actor: Any, streams: int, tokens: int, step_s: float) -> dict[str, float]:
    worker: Any = remote(DecodeWorker, "decode", actor, failed)

    async def read() -> int:
        return len([token async for token in worker.generate(tokens)])

    here, there, began = cpu_s(), await actor.cpu_s.remote(), time.perf_counter()
    ticking = actor.tick.remote(streams, tokens, step_s)
    assert await asyncio.gather(*(read() for _ in range(streams))) == [tokens] * streams
    took = time.perf_counter() - began
    await ticking
    count = streams * tokens
    return {
        "streams": streams,
        "step_ms": round(1e3 * took / tokens, 2),
        "door_us": round(1e6 * (cpu_s() - here) / count),
        "worker_us": round(1e6 * (await actor.cpu_s.remote() - there) / count),
    }


def failed(failure: Failure) -> Exception:
    return RuntimeError(failure.message)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=9.0)
    given = parser.parse_args(arguments)
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error")
    actor = ray.remote(TickingActor).options(max_concurrency=1000).remote()
    for streams in given.streams:
        row = asyncio.run(measured(actor, streams, given.tokens, given.step_ms / 1e3))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
