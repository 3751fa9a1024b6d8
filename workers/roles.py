"""One protocol for each role: stage, prefill group, decode worker. Free of torch and Ray.

Plain classes play them; `remote` makes one that is an actor. A method's form tells how it travels:

- `async def`: a call; calls run side by side.
- `def … -> AsyncIterator`: a stream; closing it early ends its work.
- `def … -> Answer`: a command. It is sent before the method returns; commands run one by one, in order.
- `def … -> Deferred`: a command of two parts. The first runs as other commands do and returns a function,
  which waits for the result beside the commands that follow.
- `def … -> None`: a notice. It overtakes commands, and nobody hears how it ended.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar, cast, get_origin, get_type_hints

from .messages import events, prompts, requests, stages, states

T = TypeVar("T")
Role = TypeVar("Role")

Answer: TypeAlias = T | Awaitable[T]
"""A value from the plain class, awaitable from afar. `settled` takes either."""
Deferred: TypeAlias = Annotated[Callable[[], T] | Awaitable[T], "deferred"]
"""Callable from the plain class, awaitable from afar."""

PrefillEvent = events.ChunkRead | events.PrefillDone | requests.Refused
GenerateEvent = events.FirstTokenTimings | events.Token | events.FinishEvent


class Stage(Protocol):
    """As its controller sees it. RequestFailed concerns one request; any other error of a command ends the
    group."""

    def open(self, request: stages.OpenRequest) -> Answer[None]:
        """Prepare for a request's chunks. A resumed one gets back the K/V of earlier chunks."""

    def run_chunk(self, command: stages.ChunkCommand) -> Deferred[stages.ChunkReport]:
        """The first part ends when everything is launched, so that the next chunk's launches need not
        wait."""

    def close(self, request_id: str) -> Answer[bool]:
        """Forget a request, if it is known. Nothing of it may run here afterwards.

        Returns: whether its pages are free. If not, a decode worker still reads them: ask again.
        """

    def pages_used(self) -> Answer[int]: ...

    def abandon(self, serial: int) -> None:
        """Let this request's chunks fail with RequestFailed within a layer's time. It is closed all the
        same."""


class Leased(Protocol):
    """A worker whose requests a door renews."""

    @property
    def name(self) -> str: ...

    async def cancel(self, request_id: str) -> None:
        """Return when the request's pages are free; unknown ids are fine."""

    async def renew(self, request_ids: Sequence[str]) -> None:
        """Extend leases; unknown ids are fine. For an ended request it says that the door knows of its
        session."""


class Group(Leased, Protocol):
    def prefill(self, job: requests.PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Returns: ChunkRead …, then one PrefillDone; or one Refused. The stream ends when every stage has
        freed its pages.
        Raises: PrefillFailed, or PrefillCancelled.
        """

    async def queue_refusal(self, tokens: int) -> requests.Refused | None:
        """Say why the queue does not take a prompt of so many tokens now; None if it has a place. Raises
        PrefillFailed."""

    async def stats(self) -> states.GroupStats:
        """Raises PrefillFailed once the group is lost."""


class KVReceiver(Protocol):
    """A decode worker, as stages see it. It ignores unknown requests."""

    async def announce(self, announcement: stages.KVAnnouncement) -> None: ...

    async def first_logits(self, message: stages.FirstLogits) -> None: ...

    async def kv(self, wanted: stages.KVRange) -> stages.HostKV:
        """Return K/V that has arrived, for a stage that goes on where another died. Raises DecodeFailed."""

    async def open_pages(self, writer: stages.PageWriter) -> tuple[int, ...]:
        """Return the request's page table, and keep its pages until the stage closes them or ends. Raises
        DecodeFailed."""

    async def close_pages(self, writer: stages.PageWriter) -> None: ...


class Rank(Protocol):
    """A rank of a decode worker other than 0, as rank 0 sees it."""

    def compute(self, work: str, *arguments: Any) -> None:
        """Send a call of `DecodeRunner`. It is made after those sent before. If it fails, the other ranks
        wait until the worker is replaced."""

    async def read(
        self, announcement: stages.KVAnnouncement, layers: Sequence[int], pages: Sequence[int]
    ) -> int:
        """Read its heads of announced K/V into its pages. Returns bytes. Raises HandoffError."""

    async def kv(self, wanted: stages.KVRange, pages: Sequence[int]) -> stages.HostKV:
        """Return its heads of K/V that has arrived."""

    async def move(self, runs: Sequence[tuple[int, int, int]], layers: range, back: bool) -> None:
        """Copy its heads of pages to slots of its host memory, in some layers; `back`: of slots to pages.
        runs: (first page, first slot, count)."""

    async def stored(self, work: str, name: bytes, slots: Sequence[int]) -> None:
        """`save` its heads of a group of slots, `load` or `remove` them. Raises StoreError."""


class DecodeWorker(Leased, KVReceiver, Protocol):
    """As doors and stages see it."""

    async def reserve(self, reservation: requests.Reservation) -> requests.Reserved | requests.Refused: ...

    async def resume(self, request_id: str, points: Sequence[int], attempt: int) -> int:
        """Begin another attempt to read a prompt whose group is gone. K/V after the returned point is
        forgotten, and only the new attempt's messages are taken.

        Returns: the last of these points, in tokens, before which all K/V is here, else 0.
        Raises: DecodeFailed for a request whose prompt is not being read.
        """

    def generate(self, job: requests.GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Yield FirstTokenTimings, Token …, one FinishEvent."""

    async def keep(self, job: requests.KeepSession) -> events.SessionKept | requests.Refused:
        """Turn a prefilled request into a session once all its K/V is here.

        Returns: Refused for an unknown or cancelled request and for a passed deadline.
        Raises: HandoffFailed if K/V cannot come any more; ValueError for ids of another prompt.
        """

    async def find_prefix(self, key: prompts.PromptKey) -> events.Prefix | None:
        """Say how much of a prompt is remembered here; None: not a page."""

    async def release_session(self, session_id: str, owner: str) -> bool:
        """False if the owner has no such session."""

    async def stats(self) -> states.DecodeStats: ...


# --- how a role's methods travel ------------------------------------------------------------------------


class Form(Enum):
    CALL = "call"
    STREAM = "stream"
    COMMAND = "command"
    DEFERRED = "deferred"
    NOTICE = "notice"


def forms(role: Callable[..., object]) -> Mapping[str, Form]:
    """A protocol passes as what it would construct."""
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
    """Make an object that plays `role`, on trust. method: makes each method from name and form."""
    return cast(Role, _StandIn(name, {each: method(each, form) for each, form in forms(role).items()}))


def sent(actor: Any, method: Callable[[Any, T], Awaitable[Any]], argument: T) -> Any:
    """Return Ray's reference to an actor's answer, for threads that wait for many."""
    return getattr(actor, method.__name__).remote(argument)


async def settled(answer: Answer[T]) -> T:
    return await answer if isinstance(answer, Awaitable) else answer


async def finished(deferred: Deferred[T]) -> T:
    return await deferred if isinstance(deferred, Awaitable) else deferred()
