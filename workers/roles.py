"""What can be asked of a stage, a prefill group and a decode worker: one protocol each, for whoever calls it
and for whoever plays it. Free of torch and Ray.

The plain classes play them (`PrefillStage`, `PrefillController`, `DecodeEngine`); `remote` makes one that
is an actor far away, `local_group` in `prefill/group` a stage on a thread. A method's form tells how it
travels:

- `async def`: a call; calls run side by side.
- `def … -> AsyncIterator`: a stream; closing it early ends the work behind it.
- `def … -> Answer`: a command. It is sent before the method returns; commands run one by one, in the
  order sent.
- `def … -> Deferred`: a command of two parts. The first runs as other commands do and returns a function.
  Calling that function, beside the commands that follow, waits for the result.
- `def … -> None`: a notice. It overtakes commands, and nobody hears how it ended.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar, cast, get_origin, get_type_hints

from .messages.events import (
    ChunkRead,
    FinishEvent,
    FirstTokenTimings,
    PrefillDone,
    Prefix,
    SessionKept,
    Token,
)
from .messages.requests import GenerateJob, KeepSession, PrefillJob, Refused, Reservation, Reserved
from .messages.stages import (
    ChunkCommand,
    ChunkReport,
    FirstLogits,
    HostKV,
    KVAnnouncement,
    KVRange,
    OpenRequest,
)
from .messages.states import DecodeStats, GroupStats

T = TypeVar("T")
Role = TypeVar("Role")

Answer: TypeAlias = T | Awaitable[T]
"""A command's: at once from the plain class, to be awaited from afar. `settled` takes either."""
Deferred: TypeAlias = Annotated[Callable[[], T] | Awaitable[T], "deferred"]
"""A two-part command's: to be called, for the plain class, or awaited, from afar."""

PrefillEvent = ChunkRead | PrefillDone | Refused
GenerateEvent = FirstTokenTimings | Token | FinishEvent


class Stage(Protocol):
    """A stage of a prefill group, as the group's controller sees it. RequestFailed concerns one request,
    anything else that a command raises is the end of the group."""

    def open(self, request: OpenRequest) -> Answer[None]: ...

    def run_chunk(self, command: ChunkCommand) -> Deferred[ChunkReport]:
        """Begun when everything is launched, so that the next chunk's launches need not wait for it."""

    def close(self, request_id: str) -> Answer[bool]:
        """Forget a request. Whether its pages are free: if not, a decode worker still reads them, and this
        is to be asked again, which takes nothing but time."""

    def pages_used(self) -> Answer[int]:
        """Pages of the requests that are open."""

    def abandon(self, serial: int) -> None:
        """Stop computing this request's chunks: they fail with RequestFailed, within a layer's time. The
        request is closed all the same."""


class Leased(Protocol):
    """What the door does with prefill groups and decode workers alike: it renews what it waits for."""

    @property
    def name(self) -> str:
        """The actor's name."""

    async def cancel(self, request_id: str) -> None:
        """Returns when the request's pages are free; unknown ids are fine."""

    async def renew(self, request_ids: Sequence[str]) -> None:
        """The door is still there; unknown ids are fine. Said of a request that has ended: the door knows of
        the session that was kept on the way, which until then lives no longer than an unheard request."""


class Group(Leased, Protocol):
    """A prefill group, as the door sees it."""

    def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """ChunkRead …, then one PrefillDone; or one Refused. Raises PrefillFailed with a plain message."""

    async def queue_refusal(self, tokens: int) -> Refused | None:
        """Say why the queue does not take a prompt of so many tokens now. Takes no place.

        Returns: None if the queue has a place.
        Raises: PrefillFailed once the group is lost.
        """

    async def stats(self) -> GroupStats:
        """Raises PrefillFailed once the group is lost."""


class KVReceiver(Protocol):
    """A decode worker, as stages see it. Requests that are not there are ignored."""

    async def announce(self, announcement: KVAnnouncement) -> None:
        """Returns when the K/V has been taken."""

    async def first_logits(self, message: FirstLogits) -> None: ...

    async def kv(self, wanted: KVRange) -> HostKV:
        """K/V that has arrived, for a stage that goes on where another died. Raises DecodeFailed for a
        request that is not there."""


class DecodeWorker(Leased, KVReceiver, Protocol):
    """A decode worker, as door and stages see it."""

    async def reserve(self, reservation: Reservation) -> Reserved | Refused: ...

    async def resume(self, request_id: str, points: Sequence[int], attempt: int) -> int:
        """The group that read this prompt is gone, and another attempt begins.

        Returns: the last of these points, in tokens, before which all K/V is here; 0 if none is. K/V of later
        tokens is forgotten, its pages stay reserved, and only messages of this attempt are taken from now on.
        Raises: DecodeFailed for a request that is not there, or whose prompt is no longer being read.
        """

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        """FirstTokenTimings, Token …, one FinishEvent."""

    async def keep(self, job: KeepSession) -> SessionKept | Refused:
        """Answers once every page is there. Raises HandoffFailed when they cannot come."""

    async def find_prefix(self, owner: str, chain: bytes) -> Prefix | None:
        """The most that one of the owner's sessions holds of a prompt with this chain; None: not a page."""

    async def release_session(self, session_id: str, owner: str) -> bool:
        """False if there is none for this owner."""

    async def stats(self) -> DecodeStats: ...


# --- how a role's methods travel ------------------------------------------------------------------------


class Form(Enum):
    CALL = "call"
    STREAM = "stream"
    COMMAND = "command"
    DEFERRED = "deferred"
    NOTICE = "notice"


def forms(role: Callable[..., object]) -> Mapping[str, Form]:
    """The methods of a role's protocol and their forms (a protocol passes as what it would construct)."""
    methods = inspect.getmembers(role, inspect.isfunction)
    return {name: _form(method) for name, method in methods if not name.startswith("_")}


def _form(method: Callable[..., object]) -> Form:
    if inspect.iscoroutinefunction(method):
        return Form.CALL
    returned = get_type_hints(method, include_extras=True)["return"]
    if get_origin(returned) is Annotated:
        return Form.DEFERRED
    if returned is type(None):
        return Form.NOTICE
    return Form.STREAM if get_origin(returned) is AsyncIterator else Form.COMMAND


class _StandIn:
    def __init__(self, name: str, methods: Mapping[str, Callable[..., Any]]) -> None:
        self.name = name
        vars(self).update(methods)


def stand_in(role: Callable[..., Role], name: str, method: Callable[[str, Form], Callable[..., Any]]) -> Role:
    """Something that can be called as `role`; `method` makes each of its methods from name and form.

    The only place where that is taken on trust: callers are checked against the protocol.
    """
    return cast(Role, _StandIn(name, {each: method(each, form) for each, form in forms(role).items()}))


def sent(actor: Any, method: Callable[[Any, T], Awaitable[Any]], argument: T) -> Any:
    """Ray's reference to an actor's answer, for who waits on a thread for many of them. method: of the role
    that the actor plays, so that the type checker sees what it takes."""
    return getattr(actor, method.__name__).remote(argument)


async def settled(answer: Answer[T]) -> T:
    """A command's outcome, from near or afar."""
    return await answer if isinstance(answer, Awaitable) else answer


async def finished(deferred: Deferred[T]) -> T:
    """A two-part command's outcome, from near or afar."""
    return await deferred if isinstance(deferred, Awaitable) else deferred()
