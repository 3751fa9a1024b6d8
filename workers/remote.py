"""Hosts plain classes in Ray actors, and makes proxies that have the same methods as the class.

A proxy never raises Ray's exceptions. It describes each as a `Failure`, which the caller's function `meaning`
turns into another exception.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from deltafront.workers import logs
from deltafront.workers.roles import Form, Role, forms, stand_in

COMMANDS, ENDS, NOTICES = "commands", "ends", "notices"
"""Ray concurrency groups of an actor that takes commands, each with one thread. COMMANDS runs commands and
the first parts of two-part commands, ENDS their second parts, NOTICES the notices."""
_THREADS = {COMMANDS: 1, ENDS: 1, NOTICES: 1}
_CALLS = 1000
"""Maximum number of concurrent calls of an actor that takes no commands. A stream counts as one call."""
CONFIRM_S = 600.0
"""Maximum seconds for which a stream waits until its caller confirms its last event."""
PACE_S = 2.5e-4
"""Seconds between two items of a stream, times the actor's running streams. An item costs that much CPU time
at both ends, with one event or with several."""
SWITCH_S = 2e-4
"""Python's thread switch interval in a worker, in seconds, so that one thread's Python code delays another
thread's launches and answers little."""
REPLICA_CPUS = 0.1
"""CPUs that a replica asks for. Its actors do the work."""

Role_co = TypeVar("Role_co", covariant=True)

logs.name_loggers()  # Ray has set up an actor's log before the actor's process imports this module


# --- hosting ----------------------------------------------------------------------------------------------


class Host(Protocol[Role_co]):
    """Base class of actors: `hosted` is the plain object that implements the role."""

    @property
    def hosted(self) -> Role_co: ...


def hosts(role: Callable[..., Role]) -> Callable[[type[Host[Role]]], Any]:
    """Return a class decorator that gives an actor every method of `role` that it lacks. Each of these calls
    the method of the same name on `hosted`.
    """

    def complete(actor_class: Any) -> Any:
        for name, form in forms(role).items():
            if not hasattr(actor_class, name):
                setattr(actor_class, name, _forwarding(name, form))
        actor_class.forms = forms(role)
        if Form.DEFERRED in actor_class.forms.values():
            actor_class.end_begun = _end_begun
        if Form.STREAM in actor_class.forms.values():
            actor_class.confirmed_stream, actor_class.confirm = _confirmed_stream, _confirm
        return actor_class

    return complete


def _forwarding(name: str, form: Form) -> Callable[..., Any]:
    async def call(self: Host[Any], *arguments: Any) -> Any:
        return await getattr(self.hosted, name)(*arguments)

    async def stream(self: Host[Any], *arguments: Any) -> AsyncIterator[Any]:
        async with aclosing(getattr(self.hosted, name)(*arguments)) as events:
            async for event in events:
                yield event

    def run(self: Host[Any], *arguments: Any) -> Any:
        return getattr(self.hosted, name)(*arguments)

    def begin(self: Host[Any], key: str, *arguments: Any) -> None:
        DeferredWork.of(self).begin(key, partial(getattr(self.hosted, name), *arguments))

    made: dict[Form, Callable[..., Any]] = {Form.CALL: call, Form.STREAM: stream, Form.DEFERRED: begin}
    return made.get(form, run)


class DeferredWork:
    """An actor's two-part commands, by key. `end` waits until the first part has run, then runs the
    second."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._works: dict[str, Future[Callable[[], Any]]] = {}

    def begin(self, key: str, first_part: Callable[[], Callable[[], Any]]) -> None:
        try:
            self._work(key).set_result(first_part())
        except Exception as error:
            self._work(key).set_exception(error)

    def end(self, key: str) -> Any:
        work = self._work(key)
        try:
            return work.result()()
        finally:
            with self._lock:
                self._works.pop(key, None)

    def _work(self, key: str) -> Future[Callable[[], Any]]:
        with self._lock:
            return self._works.setdefault(key, Future())

    @staticmethod
    def of(actor: Any) -> DeferredWork:
        begun: DeferredWork = vars(actor).setdefault("_begun_work", DeferredWork())
        return begun


def _end_begun(self: Any, key: str) -> Any:
    return DeferredWork.of(self).end(key)


async def _confirmed_stream(self: Any, key: str, name: str, *arguments: Any) -> AsyncIterator[list[Any]]:
    """Yield the events of the stream `name` in lists, then an empty list. Once the caller has confirmed them,
    end or raise the stream's error.

    At a stream's end Ray blocks the actor's event loop until the caller's process has acknowledged every
    item. If the caller's node has lost its power, this takes minutes (docs/decisions/0046).
    """
    confirmed = _unconfirmed(self)[key] = asyncio.Event()
    running: set[str] = vars(self).setdefault("_running", set())
    failure: Exception | None = None
    try:
        running.add(key)
        try:
            async with (
                aclosing(getattr(self, name)(*arguments)) as events,
                aclosing(_batched(events, lambda: PACE_S * len(running))) as batches,
            ):
                async for batch in batches:
                    yield batch
        except Exception as error:
            failure = error
        finally:
            running.discard(key)
        yield []
        with suppress(TimeoutError):
            await asyncio.wait_for(confirmed.wait(), CONFIRM_S)
    finally:
        del _unconfirmed(self)[key]
    if failure is not None:
        raise failure


async def _batched(
    events: AsyncIterator[Any], pause_s: Callable[[], float]
) -> AsyncGenerator[list[Any], None]:
    """Yield all events that have arrived, in lists. After each list wait for `pause_s()` seconds."""
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    end = object()

    async def collect() -> None:
        try:
            async for event in events:
                arrived.put_nowait(event)
        finally:
            arrived.put_nowait(end)

    collecting = asyncio.ensure_future(collect())
    try:
        while True:
            batch = [await arrived.get()]
            while not arrived.empty():
                batch.append(arrived.get_nowait())
            ended = batch[-1] is end
            if batch := batch[: len(batch) - ended]:
                yield batch
            if ended:
                break
            await asyncio.sleep(pause_s())
        await collecting  # raises the stream's error
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


async def _confirm(self: Any, key: str) -> None:
    if key in _unconfirmed(self):
        _unconfirmed(self)[key].set()


def _unconfirmed(actor: Any) -> dict[str, asyncio.Event]:
    streams: dict[str, asyncio.Event] = vars(actor).setdefault("_unconfirmed", {})
    return streams


# --- calling ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """The reason why a call to an actor failed.

    Attributes:
        message: What happened, to be appended to the actor's name, such as "died".
        cause: The exception that the method raised; None if the actor is dead or unreachable.
    """

    message: str
    cause: BaseException | None = None


def remote(role: Callable[..., Role], name: str, actor: Any, meaning: Callable[[Failure], Exception]) -> Role:
    """Make a proxy for an actor that hosts `role`. `meaning` turns a `Failure` into the exception to raise.

    The proxy sends commands outside the caller's context variables. Otherwise `ray.cancel` on the caller's
    stream would also remove the commands from the actor's queue.
    """
    return stand_in(role, name, _Caller(actor, meaning).method)


class _Caller:
    def __init__(self, actor: Any, meaning: Callable[[Failure], Exception]) -> None:
        self._actor = actor
        self._meaning = meaning
        self._outside = copy_context()

    def method(self, name: str, form: Form) -> Callable[..., Any]:
        made = {
            Form.CALL: self._call,
            Form.STREAM: self._stream,
            Form.COMMAND: self._command,
            Form.DEFERRED: self._two_part,
            Form.NOTICE: self._notice,
        }
        return partial(made[form], name)

    async def _call(self, name: str, *arguments: Any) -> Any:
        with self._plain_errors():
            return await getattr(self._actor, name).remote(*arguments)

    async def _stream(self, name: str, *arguments: Any) -> AsyncIterator[Any]:
        key = secrets.token_hex(8)
        with self._plain_errors():
            streaming = self._actor.confirmed_stream.options(num_returns="streaming")
            replies = streaming.remote(key, name, *arguments)
            try:
                async for reply in replies:
                    if not (events := await reply):
                        break
                    for event in events:
                        yield event
            finally:  # the caller has the last event, or wants no more
                self._outside.run(self._actor.confirm.remote, key)
            async for reply in replies:
                await reply  # raises the stream's error

    def _command(self, name: str, *arguments: Any) -> Awaitable[Any]:
        return self._outcome(self._send(COMMANDS, name, *arguments))

    def _two_part(self, name: str, *arguments: Any) -> Awaitable[Any]:
        key = secrets.token_hex(8)
        self._send(COMMANDS, name, key, *arguments)
        return self._outcome(self._send(ENDS, "end_begun", key))

    def _notice(self, name: str, *arguments: Any) -> None:
        self._send(NOTICES, name, *arguments)

    def _send(self, lane: str, name: str, *arguments: Any) -> Any:
        with self._plain_errors():
            return self._outside.run(in_lane(getattr(self._actor, name), lane), *arguments)

    async def _outcome(self, reply: Any) -> Any:
        with self._plain_errors():
            return await reply

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except RayError as error:
            raise self._meaning(failure_of(error)) from None


def in_lane(method: Any, lane: str) -> Callable[..., Any]:
    sending: Callable[..., Any] = method.options(concurrency_group=lane).remote
    return sending


def failure_of(error: RayError) -> Failure:
    if isinstance(error, RayActorError):
        return Failure("died")
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, BaseException)
        return Failure("failed", error.cause if known else RuntimeError("the worker failed"))
    return Failure(f"cannot be reached ({type(error).__name__})")


# --- starting -------------------------------------------------------------------------------------------


def start_actor(
    actor_class: Any, cpus: float, gpus: float, options: dict[str, Any], *arguments: Any, **named: Any
) -> Any:
    """Start an actor of a class decorated by `hosts`. Ray never restarts it."""
    commanded = Form.COMMAND in actor_class.forms.values()
    lanes = {"concurrency_groups": _THREADS} if commanded else {"max_concurrency": _CALLS}
    made = ray.remote(max_restarts=0, **lanes)(actor_class)
    return made.options(num_cpus=cpus, num_gpus=gpus, **options).remote(*arguments, **named)


def placement_of(cpus: float, gpus: float, actors: int) -> tuple[list[dict[str, float]], str]:
    """Return the bundles and strategy of a Ray placement group: bundle 0 for the replica, then one per actor.

    The strategy is PACK, because the stages may need several nodes with one GPU each.
    """
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus > 0 else {})
    return [{"CPU": REPLICA_CPUS}, *(dict(bundle) for _ in range(actors))], "PACK"
