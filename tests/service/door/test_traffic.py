"""Plays the traffic benchmark against a door with fake workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from deltafront.benchmarks.traffic import plan
from deltafront.benchmarks.traffic.__main__ import measured, parsed
from deltafront.benchmarks.traffic.client import Bodies, Server
from deltafront.benchmarks.traffic.plan import Caller, Turn
from deltafront.benchmarks.traffic.play import Played, play
from deltafront.workers.messages.requests import RefusalReason, Refused

from ..fakes import EOS
from ..inprocess import HANG_S, House
from .openai_calls import MODEL

BYTES = 256
"""The fake model's tokens without BOS and EOS."""


def played(address: str, callers: Iterable[Caller], until_s: float | None = None, **extra: object) -> Played:
    async def run() -> Played:
        async with httpx.AsyncClient(base_url=address, timeout=HANG_S) as client:
            server = Server(client, Bodies(MODEL, BYTES, 1, extra), HANG_S)
            return await play(server, callers, until_s)

    return asyncio.run(run())


def growing(session: int) -> list[Turn]:
    return [Turn(session, range(10 * n), 600 * n, 4) for n in (1, 2, 3)]


def test_conversation_reuses_its_prefix_from_turn_to_turn(address: str) -> None:
    answers = played(address, [Caller(0.0, growing(n)) for n in range(3)]).answers
    assert len(answers) == 9 and not [answer.error for answer in answers if answer.error]
    for number in range(3):
        first, *later = [answer for answer in answers if answer.turn.session == number]
        assert first.cached == 0 and all(answer.cached and answer.cached > 400 for answer in later)
        for answer in (first, *later):
            assert answer.tokens == 4 and 1 <= len(answer.arrivals_s) <= 4
            assert answer.due_s <= answer.arrivals_s[0] <= answer.done_s


def test_overloaded_server_gets_the_request_again(house: House, address: str) -> None:
    house.group.busy = [Refused(reason=RefusalReason.BUSY, message="full", retry_after_s=1.0)]
    (answer,) = played(address, plan.together(1, 100, 3)).answers
    assert (answer.retries, answer.tokens, answer.error) == (1, 3, "") and answer.done_s


def test_failed_request_says_why_and_ends_its_caller(address: str) -> None:
    (answer,) = played(address, [Caller(0.0, growing(0))], seed="a word").answers
    assert "status 400" in answer.error and "seed" in answer.error and not answer.done_s


def test_answer_of_unplanned_length_is_a_failure(house: House, address: str) -> None:
    house.decode.script = [EOS]
    (answer,) = played(address, plan.together(1, 100, 3), ignore_eos=False).answers
    assert "counted 100 prompt and 1 answer tokens, not 100 and 3" in answer.error and not answer.done_s


def test_load_without_an_end_stops_in_time(address: str) -> None:
    load = played(address, plan.agents([growing(0)], 2), until_s=0.5)
    assert load.seconds >= 0.5 and not [answer.error for answer in load.answers if answer.error]
    assert sum(not answer.done_s for answer in load.answers) <= 2


def test_command_writes_medians_of_every_load(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "traffic.json"
    command = f"--server ours --url {address} --shrink 128 --repeats 2 --vocabulary {BYTES} --result {result}"
    loads = (
        "--loads 16x8192 poisson agents_poisson --seconds 1 --rates 4 --think-s 0 --turns 2 --longest 60000"
    )
    assert asyncio.run(measured(parsed([*command.split(), *loads.split()]))) == 0
    rows = {row["load"]: row for row in json.loads(result.read_text())["rows"]}
    assert rows.keys() == {"16x8192", "poisson_4_per_s", "agents_poisson_4_per_s"}
    crowd = rows["16x8192"]
    assert (crowd["server"], crowd["model"], crowd["runs"], crowd["requests_done"]) == ("ours", MODEL, 2, 16)
    assert (crowd["prompt_tokens"], crowd["answer_tokens"]) == (16 * 64, 16 * 2)
    assert {"ttft_p99_s", "gap_p50_ms", "answer_p90_s", "client_lag_p99_ms", "goodput_per_s"} <= crowd.keys()
    assert "16x8192" in capsys.readouterr().out
