"""Sends planned requests to a server of OpenAI's HTTP API and records when tokens arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from deltafront.benchmarks.traffic.plan import Turn, token_ids

CONNECTIONS = 900
"""Open connections at most, below the usual limit of 1,024 open files. A request that waits for one is late,
and its TTFT counts the wait."""
_RETRY_S = 0.5
"""Pause before a retry if the server names none."""


@dataclass
class Answer:
    """One request and its answer. Times are seconds since the load began.

    Attributes:
        due_s: When the plan sends the request. TTFT counts from here.
        arrivals_s: Arrival of each event that brought tokens.
        tokens: Tokens received, by the server's count.
        cached: Prompt tokens from the prefix cache; None: the server does not say.
        expected_s: TTFT that the server predicted; 0: no prediction.
        done_s: When the answer was complete; 0: it is not.
        error: The reason why it failed; empty if it has not.
        retries: Times that the server was overloaded and the request was sent again.
    """

    turn: Turn
    due_s: float
    arrivals_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int | None = None
    expected_s: float = 0.0
    done_s: float = 0.0
    error: str = ""
    retries: int = 0


class Bodies:
    """Writes request bodies. Each token id is padded with spaces to one width, so that a lookup in a table
    makes the JSON of 131,072 ids within milliseconds, and other answers' times are hardly disturbed."""

    def __init__(self, model: str, vocabulary: int, seed: int, extra: Mapping[str, Any]) -> None:
        width = len(str(vocabulary - 1))
        self._written = np.array([f"{number:>{width}}," for number in range(vocabulary)], f"S{width + 1}")
        self._seed, self._vocabulary = seed, vocabulary
        usage = {"include_usage": True, "continuous_usage_stats": True}
        always = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
        self._fields = {**always, "stream_options": usage, **extra}

    def body(self, turn: Turn) -> bytes:
        ids = self._written[token_ids(turn, self._seed, self._vocabulary)].tobytes()[:-1]
        head = json.dumps({**self._fields, "max_tokens": turn.answer}).encode()
        return head[:-1] + b', "prompt": [' + ids + b"]}"


class Server:
    """The server under load. timeout_s: Longest time from a request to the end of its answer."""

    def __init__(self, client: httpx.AsyncClient, bodies: Bodies, timeout_s: float) -> None:
        self._client, self._bodies, self._timeout_s = client, bodies, timeout_s

    async def ask(self, answer: Answer, began: float) -> None:
        """Send the request, and again while the server is overloaded, and read the answer. began: the load's
        begin by time.perf_counter()."""
        body = self._bodies.body(answer.turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                while (pause_s := await self._once(answer, body, began)) is not None:
                    answer.retries += 1
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            answer.error = f"no whole answer within {self._timeout_s:g} s"
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"

    async def _once(self, answer: Answer, body: bytes, began: float) -> float | None:
        """Return the pause before a retry in seconds, or None after an answer."""
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/v1/completions", content=body, headers=headers) as reply:
            if reply.status_code in (429, 503):
                return float(reply.headers.get("retry-after", _RETRY_S))
            if reply.status_code != 200:
                raise ValueError(f"status {reply.status_code}: {(await reply.aread())[:300]!r}")
            answer.expected_s = float(reply.headers.get("x-expected-first-token-seconds", 0.0))
            usage: dict[str, Any] = {}
            async for event in _events(reply):
                usage = _usage(event)
                if usage["completion_tokens"] > answer.tokens:
                    answer.tokens = usage["completion_tokens"]
                    answer.arrivals_s.append(time.perf_counter() - began)
            _check(answer, usage)
            answer.done_s = time.perf_counter() - began
        return None


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the stream's JSON objects. Raises ValueError if the stream ends early."""
    ended = False
    async for line in reply.aiter_lines():  # to its end, so that the connection can be used again
        ended = ended or line == "data: [DONE]"
        if line.startswith("data:") and not ended:
            yield json.loads(line.removeprefix("data:"))
    if not ended:
        raise ValueError("the stream ended without [DONE]")


def _usage(event: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise ValueError(f"the server failed: {event['error']}")
    usage: dict[str, Any] | None = event.get("usage")
    if usage is None:
        raise ValueError("an event has no usage: the server must know stream_options.continuous_usage_stats")
    return usage


def _check(answer: Answer, usage: Mapping[str, Any]) -> None:
    """Set `cached`. Raises ValueError if the server did other work than planned."""
    turn, counted = answer.turn, (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if counted != (turn.tokens, turn.answer):
        raise ValueError(
            f"the server counted {counted[0]} prompt and {counted[1]} answer tokens, "
            f"not {turn.tokens} and {turn.answer}"
        )
    answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
