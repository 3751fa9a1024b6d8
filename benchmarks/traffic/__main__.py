"""Sends traffic to a server of OpenAI's HTTP API: Deltafront, or vLLM on the same card, one after the other.

    deltafront serve --model DIR             (or: vllm serve DIR --enable-prompt-tokens-details)
    python -m deltafront.benchmarks.traffic --server deltafront --result traffic.json --plot traffic.svg

DIR is a model. `python -m deltafront.benchmarks.engine --cases products --model DIR` writes one with random
weights and the shape of Llama-3.1-8B. `--server` names the rows. Run it again with vLLM's name and the same
--result: rows of both are in one file and one plot. Prompts are token ids that look random and depend on
--seed, the load and the run, so both servers get the same requests. Restart the server before you repeat a
command, or give another --seed: otherwise the server has the prompts in its prefix cache. `ignore_eos` makes
all answers as long as planned; a request fails if the server counts other tokens. A server that is overloaded
(429, 503) gets the request again, and its TTFT counts from the first try.

Loads (--loads):
- agents: --sessions agents at once for --seconds. Prompts grow turn by turn, as in --trace (the folder traces
  of github.com/callanjfox/kv-cache-tester: Claude Code's sessions), or as generated from its distributions.
  Requests that run at the end are cancelled and count as unfinished.
- 1x32768, 1x131072, 10x32768, 64x512, 64x2048, 16x8192, 32x8192: so many prompts of so many tokens at once,
  with answers of 16, 16, 128, 128, 128, 256 and 512.
- beside_131072: eight chats, then a prompt of 131,072 tokens, then a short one.
- poisson: single prompts of 512 to 32,768 tokens, which arrive in a Poisson process at each of --rates a
  second for --seconds. Rates rise until less than half of the answers are good, that is within --ttft-s and
  --gap-ms (p95 of an answer's gaps).
- agents_poisson: the same with agents' sessions in place of prompts.

A row has the medians of --repeats runs: p50, p90, p95 and p99 of TTFT, of gaps between events with tokens and
of whole answers, requests done, cached share of the prompts, tokens per second, goodput. `client_lag_…` tells
how late this process's event loop was, `client_cpu` how busy: if it is late by milliseconds, it is the limit,
and a warning says so. `--extra` adds fields to every request:

    --extra '{"method": "dpxa", "options": {"share": 0.1, "min_tokens": 0}, "page_selection": "delta"}'

On a CPU: deltafront serve --config deploy/config/demo.yaml, and here --shrink 64 --sessions 2 --seconds 20.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from deltafront.benchmarks.arguments import parser_of, told
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.traffic import plan, plot, sessions
from deltafront.benchmarks.traffic.client import CONNECTIONS, Bodies, Server
from deltafront.benchmarks.traffic.play import Played, play
from deltafront.benchmarks.traffic.report import Limits, Row, medians, merged, report

ROOT = Path(__file__).resolve().parents[2]
AGENTS, OPEN = "agents", ("poisson", "agents_poisson")
LOADS = (AGENTS, *plan.mixed(), *OPEN)
LATE_MS = 5.0
"""A load generator whose lag exceeds this at p99 disturbs the gaps that it measures."""
_SETTINGS = tuple("seconds sessions trace turns longest answer think_s seed shrink extra".split())
"""Arguments that a row records, because only rows with equal ones can be compared."""
_POOL = 500
"""Planned sessions or prompts, which repeat with other tokens when all were sent."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser, bounds, limits = parser_of(__doc__), sessions.Bounds(), Limits()
    parser.add_argument("--server", required=True, help="name of the server in the result")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none", help="bearer token")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=70.0, help="of agents and of each rate")
    parser.add_argument("--sessions", type=int, default=6, help="agents at once")
    parser.add_argument("--trace", type=Path, help="a folder of traces, or a JSONL file of them")
    parser.add_argument("--turns", type=int, default=bounds.turns, help="of a session at most")
    parser.add_argument("--longest", type=int, default=bounds.tokens, help="tokens of a session's prompt")
    parser.add_argument("--answer", type=int, default=bounds.answer, help="tokens of a turn's answer at most")
    parser.add_argument("--think-s", type=float, default=bounds.think_s, help="at most")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--ttft-s", type=float, default=limits.ttft_s)
    parser.add_argument("--gap-ms", type=float, default=1e3 * limits.gap_s)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=32_000, help="token ids are below this")
    parser.add_argument("--extra", type=told(json_object), default={}, help="JSON fields of every request")
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths of prompts and answers")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one answer")
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    parser.add_argument("--hardware", default=f"{os.cpu_count()} cores", help="recorded in the result")
    parser.add_argument("--result", type=Path, help="a JSON file, into which rows are merged")
    parser.add_argument("--plot", type=Path, help="an SVG, PDF or PNG file; needs matplotlib")
    given = parser.parse_args(arguments)
    if given.plot and not given.result:
        parser.error("--plot draws the rows of --result, which is missing")
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return given


def json_object(given: str) -> dict[str, Any]:
    value = json.loads(given)
    if not isinstance(value, dict):
        raise ValueError(f"{given!r} is no JSON object")
    return value


class Traffic:
    """Runs the loads of one command against one server."""

    def __init__(self, given: argparse.Namespace, client: httpx.AsyncClient, about: Row) -> None:
        self.given, self.client, self.about = given, client, about
        self.limits = Limits(given.ttft_s, given.gap_ms / 1e3)
        self.bounds = sessions.Bounds(given.turns, given.longest, given.answer, given.think_s)
        self.traces = sessions.read(given.trace, self.bounds) if given.trace else []
        self.failed = 0

    def planned(self, load: str, seed: int) -> list[plan.Session]:
        """Return the sessions that a load draws from."""
        if load == "poisson":
            return plan.short_prompts(_POOL, seed)
        return self.traces or sessions.generated(_POOL, seed, self.bounds)

    async def run(self) -> None:
        for load in self.given.loads:
            if load == AGENTS:
                await self.measure(load, self._agents, self.given.seconds)
            elif load in OPEN:
                await self._rising(load)
            else:
                await self.measure(load, partial(self._mixed, load))

    def _mixed(self, load: str, _seed: int) -> list[plan.Caller]:
        return plan.mixed()[load]

    def _agents(self, seed: int) -> list[plan.Caller]:
        return plan.agents(self.planned(AGENTS, seed), self.given.sessions)

    async def _rising(self, load: str) -> None:
        for rate in self.given.rates:

            def arrivals(seed: int, rate: float = rate) -> list[plan.Caller]:
                return plan.arriving(self.planned(load, seed), rate, self.given.seconds, seed)

            row = await self.measure(f"{load}_{rate:g}_per_s", arrivals)
            if row["good_share"] is not None and row["good_share"] < 0.5:
                return

    async def measure(
        self, name: str, planned: Callable[[int], list[plan.Caller]], until_s: float | None = None
    ) -> Row:
        """Play a load --repeats times, each with other tokens, and keep the medians as a row."""
        given = self.given
        rows: list[Row] = []
        for seed in range(given.seed, given.seed + given.repeats):
            callers = plan.shrunk(planned(seed), given.shrink)
            tokens_seed = zlib.crc32(f"{name} {seed}".encode())  # loads must not share prompts
            bodies = Bodies(self.about["model"], given.vocabulary, tokens_seed, given.extra)
            played = await play(Server(self.client, bodies, given.timeout_s), callers, until_s)
            rows.append(report(played, self.limits))
            self._warn(name, played, rows[-1])
        row = {"server": given.server, "load": name, **self.about, "runs": len(rows), **medians(rows)}
        print("\n".join(_lines(row)), flush=True)
        self._keep(row)
        return row

    def _warn(self, name: str, played: Played, row: Row) -> None:
        errors = [answer.error for answer in played.answers if answer.error]
        self.failed += len(errors)
        if errors:
            print(f"{name}: {len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
        if row.get("client_lag_p99_ms", 0.0) > LATE_MS:
            print(
                f"{name}: this process was {row['client_lag_p99_ms']} ms late (p99) and used "
                f"{row['client_cpu']} cores: its gaps are not the server's; give it an idle core",
                file=sys.stderr,
            )

    def _keep(self, row: Row) -> None:
        path: Path | None = self.given.result
        if path is None:
            return
        old = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = merged(old, row)
        write_json(path, {"rows": rows})
        if self.given.plot:
            plot.draw(self.given.plot, rows)


def _lines(row: Row, indent: str = "") -> Iterator[str]:
    """Format a row for reading, nested rows below it."""
    flat = [f"{name}={value}" for name, value in row.items() if not isinstance(value, dict)]
    if flat:
        yield indent + " ".join(flat)
    for name, value in row.items():
        if isinstance(value, dict):
            yield f"{indent}  {name}:"
            yield from _lines(value, indent + "    ")


async def described(client: httpx.AsyncClient, given: argparse.Namespace) -> Row:
    """Describe the server (the version and model that it reports), the machine and the load."""
    version = (await client.get("/version")).raise_for_status().json()["version"]
    models: Iterable[dict[str, Any]] = (await client.get("/v1/models")).raise_for_status().json()["data"]
    model = given.model or next(iter(models))["id"]
    settings = {name: getattr(given, name) for name in _SETTINGS}
    settings["trace"] = str(given.trace) if given.trace else None
    about = {
        "version": version,
        "model": model,
        "hardware": given.hardware,
        "commit": given.commit or commit_of(ROOT),
    }
    return {**about, "settings": settings}


async def measured(given: argparse.Namespace) -> int:
    """Run all loads. Return the number of failed requests."""
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    headers = {"authorization": f"Bearer {given.key}"}
    async with httpx.AsyncClient(base_url=given.url, headers=headers, limits=limits, timeout=None) as client:
        traffic = Traffic(given, client, await described(client, given))
        await traffic.run()
        return traffic.failed


def main() -> None:
    raise SystemExit(1 if asyncio.run(measured(parsed())) else 0)


if __name__ == "__main__":
    main()
