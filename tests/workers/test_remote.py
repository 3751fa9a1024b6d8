"""Tests roles as Ray actors: how each method is called, hosting, calls and errors of a proxy, and that mypy
checks every call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, TaskCancelledError

from deltafront.service.errors import WorkerFailed, WorkerHandoffFailed, WorkerLost
from deltafront.service.fleet.ray_directory import worker_error
from deltafront.workers import remote as workers_remote
from deltafront.workers.messages.requests import PrefillFailed
from deltafront.workers.messages.stages import HandoffFailed, RequestFailed
from deltafront.workers.prefill.group.group import remote_stage
from deltafront.workers.remote import COMMANDS, ENDS, NOTICES, hosts, remote
from deltafront.workers.roles import DecodeWorker, Form, Group, Stage, forms

ROOT = Path(__file__).resolve().parents[2]


def test_method_signature_decides_the_kind_of_remote_call() -> None:
    commands = dict.fromkeys(("open", "close", "pages_used"), Form.COMMAND)
    assert forms(Stage) == {**commands, "run_batch": Form.DEFERRED, "abandon": Form.NOTICE}
    calls = dict.fromkeys(("cancel", "renew", "stats"), Form.CALL)
    assert forms(Group) == {**calls, "queue_refusal": Form.CALL, "prefill": Form.STREAM}
    kv = "announce first_logits state kv held_state open_pages close_pages"
    names = f"{kv} reserve keep resume find_prefix release_session".split()
    more = dict.fromkeys(names, Form.CALL)
    assert forms(DecodeWorker) == {**calls, **more, "generate": Form.STREAM}


# --- hosting ----------------------------------------------------------------------------------------------


class Plain:
    """Stands in for a prefill group, with two of its methods."""

    def __init__(self) -> None:
        self.closed = 0

    async def prefill(self, job: int) -> AsyncIterator[int]:
        try:
            for number in range(job):
                yield number
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            self.closed += 1

    async def stats(self) -> str:
        return "well"


@hosts(Group)
class PlainActor:
    def __init__(self) -> None:
        self.hosted: Any = Plain()


async def test_actor_calls_its_object_and_closes_abandoned_streams() -> None:
    actor: Any = PlainActor()
    assert await actor.stats() == "well"
    assert [number async for number in actor.prefill(3)] == [0, 1, 2]
    assert actor.hosted.closed == 1
    stream = actor.prefill(3)
    assert await anext(stream) == 0
    await stream.aclose()
    assert actor.hosted.closed == 2


async def test_stream_ends_once_its_caller_has_confirmed_it() -> None:
    actor: Any = PlainActor()
    events = actor.confirmed_stream("key", "prefill", 2)
    assert [await anext(events) for _ in range(3)] == [[0], [1], []]
    assert actor.hosted.closed == 1, "it holds nothing while it waits"
    end = asyncio.ensure_future(anext(events, "ended"))
    await actor.confirm("another key")
    await asyncio.sleep(0)
    assert not end.done()
    await actor.confirm("key")
    assert await end == "ended"
    assert not actor._unconfirmed, "nothing is kept of what has ended"


async def test_failed_stream_raises_once_its_caller_has_confirmed_it() -> None:
    actor: Any = PlainActor()
    events = actor.confirmed_stream("key", "prefill", "no number")
    assert await anext(events) == []
    await actor.confirm("key")
    with pytest.raises(TypeError, match="str"):
        await anext(events)


async def test_stream_of_a_lost_caller_ends_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_remote, "CONFIRM_S", 0.01)
    actor: Any = PlainActor()
    assert [events async for events in actor.confirmed_stream("key", "prefill", 2)] == [[0], [1], []]
    assert not actor._unconfirmed


async def test_abandoned_stream_is_closed_at_once() -> None:
    actor: Any = PlainActor()
    events = actor.confirmed_stream("key", "prefill", 2)
    assert await anext(events) == [0]
    await events.aclose()
    assert actor.hosted.closed == 1 and not actor._unconfirmed


async def test_events_that_come_in_a_pause_are_sent_together() -> None:
    """Without a pause each would be an item of its own."""
    came, waiting = asyncio.Queue[int](), asyncio.Event()

    async def events() -> AsyncIterator[int]:
        while number := await came.get():
            yield number

    def pause_s() -> float:
        waiting.set()
        return 0.05

    came.put_nowait(1)
    lists = workers_remote._batched(events(), pause_s)
    assert await anext(lists) == [1]
    following = asyncio.ensure_future(anext(lists))
    await waiting.wait()
    for number in (2, 3):
        came.put_nowait(number)
        await asyncio.sleep(0)
    assert await following == [2, 3]
    came.put_nowait(0)
    assert await anext(lists, "ended") == "ended"


async def test_streams_send_less_often_the_more_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[Callable[[], float]] = []

    async def batched(events: AsyncIterator[int], pause_s: Callable[[], float]) -> AsyncIterator[list[int]]:
        pauses.append(pause_s)
        async for event in events:
            yield [event]

    monkeypatch.setattr(workers_remote, "_batched", batched)
    actor: Any = PlainActor()
    streams = [actor.confirmed_stream(key, "prefill", 2) for key in ("a", "b")]
    for stream in streams:
        assert await anext(stream) == [0]
    assert [pause_s() for pause_s in pauses] == [2 * workers_remote.PACE_S] * 2
    assert [await anext(streams[0]) for _ in range(2)] == [[1], []]
    assert pauses[1]() == workers_remote.PACE_S, "a stream that only waits for its caller costs nothing"
    for stream in streams:
        await stream.aclose()


class TwoParts:
    """Stands in for a stage. The test decides when its chunks end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def run_batch(self, command: str) -> Callable[[], str]:
        if command == "bad":
            raise RequestFailed("not this one")
        self.begun.append(command)

        def end() -> str:
            assert self.go.wait(60)
            if command == "broken":
                raise ValueError("broken")
            return f"{command} has ended"

        return end


def test_second_part_of_a_command_does_not_block_later_commands() -> None:
    """The first and the second part run on separate threads, as in the actor. The second may be requested
    first."""

    @hosts(Stage)
    class TwoPartActor:
        def __init__(self) -> None:
            self.hosted: Any = TwoParts()

    actor: Any = TwoPartActor()
    with ThreadPoolExecutor(1) as commands, ThreadPoolExecutor(1) as ends:
        chunks = ("a", "bad", "broken", "b")
        answers = [ends.submit(actor.end_begun, f"key of {chunk}") for chunk in chunks]
        for chunk in chunks:
            commands.submit(actor.run_batch, f"key of {chunk}", chunk).result(60)
        assert actor.hosted.begun == ["a", "broken", "b"] and not answers[0].done()
        actor.hosted.go.set()
        assert answers[0].result(60) == "a has ended"
        with pytest.raises(RequestFailed, match="not this one"):
            answers[1].result(60)
        with pytest.raises(ValueError, match="broken"):
            answers[2].result(60)
        assert answers[3].result(60) == "b has ended"
    assert not actor._begun_work._works, "nothing is kept of what has ended"


# --- calling ----------------------------------------------------------------------------------------------


class Handle:
    """Stands in for an actor's handle. Records the calls; `outcome` is the result or error of each."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.sent: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return Method(self, name, {})


class Method:
    def __init__(self, handle: Handle, name: str, options: dict[str, Any]) -> None:
        self.handle, self.name, self.how = handle, name, options

    def options(self, **options: Any) -> Method:
        return Method(self.handle, self.name, options)

    def remote(self, *arguments: Any) -> Any:
        self.handle.sent.append((self.name, self.how, arguments))
        return self._stream() if "num_returns" in self.how else self._reply(self.handle.outcome)

    def _reply(self, outcome: Any) -> Any:
        reply = asyncio.get_running_loop().create_future()
        if isinstance(outcome, Exception):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)
        return reply

    async def _stream(self) -> AsyncIterator[Any]:
        outcome = self.handle.outcome
        yield self._reply(outcome if isinstance(outcome, Exception) else [outcome])
        yield self._reply([])


@pytest.mark.parametrize("seen", [[7], [7, "ended"]], ids=["closed", "ended"])
async def test_caller_confirms_a_stream_that_it_closes_or_that_ends(seen: list[Any]) -> None:
    handle = Handle(7)
    group: Any = remote(Group, "prefill:a", handle, partial(worker_error, "prefill:a"))
    events = group.prefill("job")
    assert [await anext(events, "ended") for _ in seen] == seen
    await events.aclose()
    (_, _, (key, *asked)), (name, _, confirmed) = handle.sent
    assert (asked, name, confirmed) == (["prefill", "job"], "confirm", (key,))


async def test_commands_are_sent_before_await_and_notices_use_another_queue() -> None:
    handle = Handle(7)
    stage: Any = remote_stage(handle, 0)
    replies = [stage.close("a"), stage.pages_used(), stage.close("b")]
    assert stage.abandon(3) is None
    commands, notices = {"concurrency_group": COMMANDS}, {"concurrency_group": NOTICES}
    assert handle.sent == [
        ("close", commands, ("a",)),
        ("pages_used", commands, ()),
        ("close", commands, ("b",)),
        ("abandon", notices, (3,)),
    ]
    assert await asyncio.gather(*replies) == [7, 7, 7]


async def test_both_parts_of_a_remote_command_are_sent_at_once() -> None:
    handle = Handle(7)
    stage: Any = remote_stage(handle, 0)
    replies = [stage.run_batch("a"), stage.run_batch("b"), stage.close("c")]
    begun = {"concurrency_group": COMMANDS}, {"concurrency_group": ENDS}
    names = [(name, how) for name, how, _ in handle.sent]
    assert names == [("run_batch", begun[0]), ("end_begun", begun[1])] * 2 + [("close", begun[0])]
    keys = [arguments[0] for _, _, arguments in handle.sent[:4]]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert [handle.sent[n][2][1] for n in (0, 2)] == ["a", "b"]
    assert await asyncio.gather(*replies) == [7, 7, 7]


def raised_by_task(cause: Exception | None) -> RayTaskError:
    return RayTaskError("method", "Traceback: /home/someone/code.py line 3", cause)


@pytest.mark.parametrize(
    ("error", "wanted", "message"),
    [
        (ActorDiedError(), RuntimeError, "stage 1 died"),
        (raised_by_task(RequestFailed("no such id")), RequestFailed, "no such id"),
        (raised_by_task(HandoffFailed("K/V is lost")), HandoffFailed, "K/V is lost"),
        (raised_by_task(KeyError("x")), RuntimeError, "stage 1: KeyError: 'x'"),
        (TaskCancelledError(), RuntimeError, "stage 1 cannot be reached (TaskCancelledError)"),
    ],
)
async def test_stage_failures_become_plain_errors(
    error: Exception, wanted: type[Exception], message: str
) -> None:
    stage: Any = remote_stage(Handle(error), 1)
    with pytest.raises(wanted) as raised:
        await stage.run_batch(None)
    assert type(raised.value) is wanted and str(raised.value) == message
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("error", "wanted", "message"),
    [
        (ActorDiedError(), WorkerLost, "prefill:a died"),
        (raised_by_task(PrefillFailed("it was cancelled\nby you")), WorkerFailed, "it was cancelled"),
        (raised_by_task(HandoffFailed("K/V is lost")), WorkerHandoffFailed, "K/V is lost"),
        (raised_by_task(ValueError("")), WorkerFailed, "the worker failed"),
        (raised_by_task(None), WorkerFailed, "the worker failed"),
        (GetTimeoutError(), WorkerLost, "prefill:a cannot be reached (GetTimeoutError)"),
    ],
)
async def test_worker_failures_become_the_api_servers_errors(
    error: Exception, wanted: type[Exception], message: str
) -> None:
    group: Any = remote(Group, "prefill:a", Handle(error), partial(worker_error, "prefill:a"))
    assert group.name == "prefill:a"
    for ask in (group.stats, lambda: anext(group.prefill(None))):
        with pytest.raises(wanted) as raised:
            await ask()
        assert type(raised.value) is wanted
        assert str(raised.value) == message and raised.value.__cause__ is None


# --- types ------------------------------------------------------------------------------------------------

CALLS = """
from deltafront.workers.messages.requests import Reservation
from deltafront.workers.messages.stages import ChunkCommand
from deltafront.workers.remote import Failure, hosts, remote
from deltafront.workers.roles import DecodeWorker, Group, Stage

def meaning(failure: Failure) -> Exception: return RuntimeError(failure.message)

async def call(actor: object, command: ChunkCommand, reservation: Reservation) -> None:
    stage = remote(Stage, "stage 0", actor, meaning)
    worker = remote(DecodeWorker, "decode:a", actor, meaning)
    stage.run_batch([command])
    await worker.reserve(reservation)
    stage.run_batch(command)  # wrong: [arg-type]
    stage.prefill(command)  # wrong: [attr-defined]
    await worker.reserve(reservation, 1)  # wrong: [call-arg]
    answer: int = await worker.reserve(reservation)  # wrong: [assignment]

class Half:
    def open(self, request: str) -> None: ...

@hosts(Stage)  # wrong: [arg-type]
class HalfActor:
    def __init__(self) -> None:
        self.hosted = Half()
"""


def test_type_checker_checks_remote_calls_and_hosted_classes(tmp_path: Path) -> None:
    (tmp_path / "deltafront").symlink_to(ROOT)
    snippet = tmp_path / "snippet.py"
    snippet.write_text(textwrap.dedent(CALLS))
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    ours_alone = [
        "--follow-imports",
        "silent",
        "--no-site-packages",
    ]  # checking the types of numpy and torch takes long
    command = [sys.executable, "-m", "mypy", *settings, *ours_alone, str(snippet)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if "error:" in line}
    lines = enumerate(CALLS.splitlines(), start=1)
    wanted = {number: line.split("wrong: ")[1] for number, line in lines if "wrong: " in line}
    assert found.keys() == wanted.keys(), done.stdout + done.stderr
    for number, code in wanted.items():
        assert code in found[number], found[number]
