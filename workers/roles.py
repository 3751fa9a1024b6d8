"""Interfaces of the worker processes: pipeline stage, prefill group, decode worker, tensor-parallel rank.

Plain classes implement these protocols, and `remote` makes proxies for Ray actors. This module imports
neither torch nor Ray. A method's signature says how a proxy sends its calls:

- `async def`: a call. Calls run concurrently.
- `def … -> AsyncIterator`: a stream. Closing it early stops the work.
- `def … -> Answer`: a command. It is sent before the method returns. Commands run one by one, in order.
- `def … -> Deferred`: a command in two parts. The first part runs like other commands and returns a function
  that waits for the result. This function runs concurrently with later commands.
- `def … -> None`: a notice. It overtakes commands, and the caller does not learn whether it failed.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar, cast, get_origin, get_type_hints

from deltafront.workers.messages import events, prompts, requests, stages, states
from deltafront.workers.messages.service_tiers import ServiceTier

T = TypeVar("T")
Role = TypeVar("Role")

Answer: TypeAlias = T | Awaitable[T]
"""A command's result: a plain class returns the value, a proxy an awaitable. `settled` takes both."""
Deferred: TypeAlias = Annotated[Callable[[], T] | Awaitable[T], "deferred"]
"""A two-part command's result: a plain class returns a callable, a proxy an awaitable. `finished` takes
both."""

PrefillEvent = events.PrefillQueued | events.ChunkRead | events.PrefillDone | requests.Refused
GenerateEvent = events.PromptLogprobs | events.FirstTokenTimings | events.Token | events.FinishEvent


class Stage(Protocol):
    """A pipeline stage's methods, which its prefill group's controller calls.

    RequestFailed ends one request. Any other error of a command ends the whole group.
    """

    def open(self, request: stages.OpenRequest) -> Answer[None]:
        """Prepare for a request's chunks. If the request resumes, fetch earlier KV from the decode worker."""

    def run_batch(
        self, commands: Sequence[stages.ChunkCommand]
    ) -> Deferred[list[stages.ChunkReport | stages.RequestFailed]]:
        """Run chunks of different prompts together. The first part returns once all kernels are launched,
        before the GPU has finished.

        Returns:
            Each chunk's report, or the error that ends its request.
        """

    def close(self, request_id: str) -> Answer[bool]:
        """End a request; unknown ids are ignored. The caller must not send further commands for it.

        Returns:
            True if its pages are free. If not, a decode worker still reads them; call again later.
        """

    def pages_used(self) -> Answer[int]: ...

    def abandon(self, serial: int) -> None:
        """Make a request's chunks fail with RequestFailed before their next layer. Other chunks of their
        batches go on. The caller must still close the request."""


class Leased(Protocol):
    """A worker whose requests hold leases. An API server renews them."""

    @property
    def name(self) -> str: ...

    async def cancel(self, request_id: str) -> None:
        """Cancel a request, and wait until its pages are free. Unknown ids are ignored."""

    async def renew(self, request_ids: Sequence[str]) -> None:
        """Extend the requests' leases; unknown ids are ignored. Renewing an ended request confirms that the
        API server knows of the session made from it."""


class Group(Leased, Protocol):
    def prefill(self, job: requests.PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Prefill a prompt. Yields PrefillQueued if its time is predictable, ChunkRead for each chunk and one
        PrefillDone; or one Refused.

        The stream ends when every stage has freed the request's pages.

        Raises:
            PrefillFailed, PrefillCancelled: The prompt was not prefilled.
        """

    async def queue_refusal(
        self, tokens: int, tier: ServiceTier = ServiceTier.DEFAULT
    ) -> requests.Refused | None:
        """Return the refusal of a prompt of `tokens` tokens by its tier's queue; None if there is room.
        Raises PrefillFailed."""

    async def stats(self) -> states.GroupStats:
        """Return the group's state. Raises PrefillFailed once the group is lost."""


class KVReceiver(Protocol):
    """A decode worker's methods that prefill stages call to hand over KV. Unknown requests are ignored."""

    async def announce(self, announcement: stages.KVAnnouncement) -> None: ...

    async def first_logits(self, message: stages.FirstLogits) -> None: ...

    async def state(self, message: stages.HandedState) -> None: ...

    async def kv(self, wanted: stages.KVRange) -> stages.HostKV:
        """Return KV that has arrived, to a stage that resumes a prompt of a dead prefill group. Raises
        DecodeFailed.
        """

    async def held_state(self, request_id: str) -> stages.HandedState:
        """Return the state with which a prefill group continues a request's prompt: after its cached prefix,
        or where the previous attempt ended. Raises DecodeFailed if there is none."""

    async def open_pages(self, writer: stages.PageWriter) -> stages.OpenedPages:
        """Return the request's page table and state slots, so that a stage can write into them. They stay
        allocated until the stage calls `close_pages` or its process ends. Raises DecodeFailed."""

    async def close_pages(self, writer: stages.PageWriter) -> None: ...


class Rank(Protocol):
    """The methods of a tensor-parallel rank of a decode worker. Rank 0 calls them on the other ranks."""

    def compute(self, work: str, *arguments: Any) -> None:
        """Call the method `work` of this rank's `DecodeRunner`. Calls run in the order in which they are
        sent. If one fails, the other ranks hang until the worker is replaced."""

    async def read(
        self, announcement: stages.KVAnnouncement, layers: Sequence[int], pages: Sequence[int]
    ) -> int:
        """Copy this rank's KV heads of announced KV into its pages. Returns the number of bytes. Raises
        HandoffError.
        """

    async def kv(self, wanted: stages.KVRange, pages: Sequence[int]) -> stages.HostKV:
        """Return this rank's KV heads of KV that has arrived."""

    async def move(self, runs: Sequence[tuple[int, int, int]], layers: range, back: bool) -> None:
        """Copy runs (first page, first slot, count) of pages to host memory, or back, in `layers`
        (`HostMemory.copy`)."""

    async def state(self, work: str, *arguments: Any) -> Any:
        """Call the method `work` of this rank's `RankStates`, after all calls that `compute` has sent."""

    async def stored(self, work: str, name: bytes, slots: Sequence[int], state: int) -> None:
        """Save host-memory slots to a file, load them from it, or remove the file (`HostMemory.stored`).
        Raises StoreError."""


class DecodeWorker(Leased, KVReceiver, Protocol):
    """A decode worker's methods, which API servers and prefill stages call."""

    async def reserve(self, reservation: requests.Reservation) -> requests.Reserved | requests.Refused: ...

    async def resume(self, request_id: str, points: Sequence[int], attempt: int) -> int:
        """Begin another attempt at a prompt whose prefill group is lost. The worker drops KV after the
        returned point, and from then on accepts only the new attempt's messages.

        Returns:
            The last of `points` (token positions) before which all KV has arrived. If there is none: the
                number of tokens that a session or cached prefix already provides.
        Raises:
            DecodeFailed: The request's prompt is not being prefilled.
        """

    def generate(self, job: requests.GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Yield one FirstTokenTimings, each Token, and one FinishEvent."""

    async def keep(self, job: requests.KeepSession) -> events.SessionKept | requests.Refused:
        """Wait until all KV of a request has arrived, then turn the request into a session.

        Returns:
            Refused if the request is unknown or cancelled, or its deadline has passed.
        Raises:
            HandoffFailed: KV is lost.
            ValueError: `job.prompt_ids` belong to another prompt.
        """

    async def find_prefix(self, key: prompts.PromptKey) -> events.Prefix | None:
        """Return the prompt's prefix hit on this worker; None if it is shorter than a page."""

    async def release_session(self, session_id: str, owner: str) -> bool:
        """End a session. Returns False if the owner has no such session."""

    async def stats(self) -> states.DecodeStats: ...


# --- how a proxy sends the calls of a role's methods ------------------------------------------------------


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
    """Make an object with the methods of `role`. `method` makes each one from its name and `Form`."""
    return cast(Role, _StandIn(name, {each: method(each, form) for each, form in forms(role).items()}))


def sent(actor: Any, method: Callable[[Any, T], Awaitable[Any]], argument: T) -> Any:
    """Call an actor's method and return Ray's ObjectRef, so that a thread can wait for several answers."""
    return getattr(actor, method.__name__).remote(argument)


async def settled(answer: Answer[T]) -> T:
    return await answer if isinstance(answer, Awaitable) else answer


async def finished(deferred: Deferred[T]) -> T:
    return await deferred if isinstance(deferred, Awaitable) else deferred()
