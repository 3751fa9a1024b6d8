"""Roles as Ray actors: hosts a plain class in an actor, and makes proxies with the same methods.

A proxy never raises Ray's exceptions. It raises the exception that `meaning` makes of a `Failure`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from deltafront.workers.roles import Form, Role, forms, stand_in

COMMANDS, ENDS, NOTICES = "commands", "ends", "notices"
"""Concurrency groups of an actor that takes commands: commands (their first parts), the ends of two-part
commands, and notices, one thread each. Any other call would block all."""
_THREADS = {COMMANDS: 1, ENDS: 1, NOTICES: 1}
_CALLS = 1000
"""The most calls under way on any other actor. A stream is one call."""
REPLICA_CPUS = 0.1
"""CPUs that a replica asks for. Its actors do the work."""

Role_co = TypeVar("Role_co", covariant=True)


# --- hosting ----------------------------------------------------------------------------------------------


class Host(Protocol[Role_co]):
    """Base class of actors: `hosted` is the plain object that implements the role."""

    @property
    def hosted(self) -> Role_co: ...


def hosts(role: Callable[..., Role]) -> Callable[[type[Host[Role]]], Any]:
    """Return a decorator that adds the role's missing methods to an actor class. Each forwards to
    `hosted`.
    """

    def complete(actor_class: Any) -> Any:
        for name, form in forms(role).items():
            if not hasattr(actor_class, name):
                setattr(actor_class, name, _forwarding(name, form))
        actor_class.forms = forms(role)
        if Form.DEFERRED in actor_class.forms.values():
            actor_class.end_begun = _end_begun
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
    """The deferred commands whose first part an actor has run, by key. A request for the result waits for the
    first part."""

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


# --- calling ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """The reason why a call of an actor failed.

    Attributes:
        message: The text after the actor's name.
        cause: The exception that the method raised; None if the actor is dead or unreachable.
    """

    message: str
    cause: BaseException | None = None


def remote(role: Callable[..., Role], name: str, actor: Any, meaning: Callable[[Failure], Exception]) -> Role:
    """Make a proxy for an actor that hosts `role`. `meaning` turns a `Failure` into the exception to raise.

    Commands are sent outside their caller's context: otherwise `ray.cancel` of a request's stream would
    remove them from the actor's queue.
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
        with self._plain_errors():
            async for reply in getattr(self._actor, name).options(num_returns="streaming").remote(*arguments):
                yield await reply

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
    """Return the Ray bundles (0: the replica, then one per actor) and the strategy PACK, since stages may
    need several one-GPU nodes.
    """
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus > 0 else {})
    return [{"CPU": REPLICA_CPUS}, *(dict(bundle) for _ in range(actors))], "PACK"
