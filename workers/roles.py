"""One protocol for each role: stage, prefill group, decode worker, rank. It needs neither torch nor Ray.

Plain classes implement them; `remote` makes a proxy for an actor. A method's signature says how its calls
are sent:

- `async def`: a call; calls run concurrently.
- `def … -> AsyncIterator`: a stream; closing it early ends its work.
- `def … -> Answer`: a command. It is sent before the method returns; commands run one by one, in order.
- `def … -> Deferred`: a command in two parts. The first part runs like other commands and returns a function
  that waits for the result, concurrently with later commands.
- `def … -> None`: a notice. It overtakes commands, and the caller does not learn whether it failed.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar, cast, get_origin, get_type_hints

from deltafront.workers.messages import events, prompts, requests, stages, states

T = TypeVar("T")
Role = TypeVar("Role")

Answer: TypeAlias = T | Awaitable[T]
"""The value from a plain class, an awaitable from a proxy. `settled` takes either."""
Deferred: TypeAlias = Annotated[Callable[[], T] | Awaitable[T], "deferred"]
"""A callable from a plain class, an awaitable from a proxy. `finished` takes either."""

PrefillEvent = events.ChunkRead | events.PrefillDone | requests.Refused
GenerateEvent = events.FirstTokenTimings | events.Token | events.FinishEvent


class Stage(Protocol):
    """A stage's methods for its controller.

    RequestFailed concerns one request. Any other error of a command ends the group.
    """

    def open(self, request: stages.OpenRequest) -> Answer[None]:
        """Prepare for a request's chunks. If the request is resumed, fetch the KV of earlier chunks back."""

    def run_chunk(self, command: stages.ChunkCommand) -> Deferred[stages.ChunkReport]:
        """Run a chunk. The first part returns when everything is launched, so that the next chunk can be
        launched."""

    def close(self, request_id: str) -> Answer[bool]:
        """End a request, if it is known. None of its commands may follow.

        Returns:
            Whether its pages are free. If not, call again later: a decode worker still reads them.
        """

    def pages_used(self) -> Answer[int]: ...

    def abandon(self, serial: int) -> None:
        """Make this request's chunks fail with RequestFailed within a layer's time. It must still be
        closed."""


class Leased(Protocol):
    """A worker whose requests a door renews."""

    @property
    def name(self) -> str: ...

    async def cancel(self, request_id: str) -> None:
        """Cancel a request, and return when its pages are free. Unknown ids are ignored."""

    async def renew(self, request_ids: Sequence[str]) -> None:
        """Extend the requests' leases; unknown ids are ignored. Renewing an ended request confirms that the
        door knows of its session."""


class Group(Leased, Protocol):
    def prefill(self, job: requests.PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Prefill a prompt: yield ChunkRead for each chunk, then one PrefillDone; or one Refused.

        The stream ends when every stage has freed the request's pages.

        Raises:
            PrefillFailed, PrefillCancelled: The prompt was not prefilled.
        """

    async def queue_refusal(self, tokens: int) -> requests.Refused | None:
        """Return why the queue does not take a prompt of `tokens` tokens now; None if it does. Raises
        PrefillFailed."""

    async def stats(self) -> states.GroupStats:
        """Return the group's state. Raises PrefillFailed once the group is lost."""


class KVReceiver(Protocol):
    """A decode worker's methods for stages. It ignores unknown requests."""

    async def announce(self, announcement: stages.KVAnnouncement) -> None: ...

    async def first_logits(self, message: stages.FirstLogits) -> None: ...

    async def kv(self, wanted: stages.KVRange) -> stages.HostKV:
        """Return KV that has arrived, for a stage that resumes a prompt of a dead group. Raises
        DecodeFailed.
        """

    async def open_pages(self, writer: stages.PageWriter) -> tuple[int, ...]:
        """Return the request's page table, and hold its pages until the stage closes them or ends. Raises
        DecodeFailed."""

    async def close_pages(self, writer: stages.PageWriter) -> None: ...


class Rank(Protocol):
    """The methods of a decode worker's other ranks for rank 0."""

    def compute(self, work: str, *arguments: Any) -> None:
        """Run a call of `DecodeRunner`, after those sent before. If it fails, the other ranks hang until the
        worker is replaced."""

    async def read(
        self, announcement: stages.KVAnnouncement, layers: Sequence[int], pages: Sequence[int]
    ) -> int:
        """Read this rank's heads of announced KV into its pages. Returns the bytes read. Raises
        HandoffError.
        """

    async def kv(self, wanted: stages.KVRange, pages: Sequence[int]) -> stages.HostKV:
        """Return this rank's heads of KV that has arrived."""

    async def move(self, runs: Sequence[tuple[int, int, int]], layers: range, back: bool) -> None:
        """Copy pages of some layers to slots of host memory, or slots to pages if `back`, as
        `HostMemory.copy` does."""

    async def stored(self, work: str, name: bytes, slots: Sequence[int]) -> None:
        """Save, load or remove a group of slots, as `HostMemory.stored` does. Raises StoreError."""


class DecodeWorker(Leased, KVReceiver, Protocol):
    """A decode worker's methods for doors and stages."""

    async def reserve(self, reservation: requests.Reservation) -> requests.Reserved | requests.Refused: ...

    async def resume(self, request_id: str, points: Sequence[int], attempt: int) -> int:
        """Begin another attempt at a prompt whose group is lost. KV after the returned point is dropped, and
        only the new attempt's messages are accepted.

        Returns:
            The last of `points`, in tokens, before which all KV has arrived; the number of held tokens if
                there is none.
        Raises:
            DecodeFailed: The request's prompt is not being prefilled.
        """

    def generate(self, job: requests.GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Yield one FirstTokenTimings, each Token, and one FinishEvent."""

    async def keep(self, job: requests.KeepSession) -> events.SessionKept | requests.Refused:
        """Turn a prefilled request into a session once all its KV has arrived.

        Returns:
            Refused if the request is unknown or cancelled, or its deadline has passed.
        Raises:
            HandoffFailed: KV is lost.
            ValueError: The ids are those of another prompt.
        """

    async def find_prefix(self, key: prompts.PromptKey) -> events.Prefix | None:
        """Return the prompt's prefix hit on this worker; None if that is less than a page."""

    async def release_session(self, session_id: str, owner: str) -> bool:
        """End a session. Returns False if the owner has no such session."""

    async def stats(self) -> states.DecodeStats: ...


# --- how a role's methods travel ------------------------------------------------------------------------


class Form(Enum):
    CALL = "call"
    STREAM = "stream"
    COMMAND = "command"
    DEFERRED = "deferred"
    NOTICE = "notice"


def forms(role: Callable[..., object]) -> Mapping[str, Form]:
    """Return the `Form` of each method of a role, by name."""
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
    """Make an object with the methods of `role`, unchecked by the type checker. `method` makes each method
    from its name and form.
    """
    return cast(Role, _StandIn(name, {each: method(each, form) for each, form in forms(role).items()}))


def sent(actor: Any, method: Callable[[Any, T], Awaitable[Any]], argument: T) -> Any:
    """Call an actor and return Ray's reference to its answer, for threads that wait for several answers."""
    return getattr(actor, method.__name__).remote(argument)


async def settled(answer: Answer[T]) -> T:
    return await answer if isinstance(answer, Awaitable) else answer


async def finished(deferred: Deferred[T]) -> T:
    return await deferred if isinstance(deferred, Awaitable) else deferred()
