"""The requests of one door. Each has exactly one outcome and one line in the audit log.

A protocol's code does three things:

1. It opens a `with` block by `accept`, which lasts as long as the request.
2. It parses the message for `run`, and keeps no reference to the text.
3. It sends the events, and turns the block's DeltafrontError into a status. It closes the stream when the
   client disconnects, which cancels the run.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Protocol

from deltafront.service.errors import (
    Cancelled,
    DeltafrontError,
    Internal,
    InvalidArgument,
    NotFound,
    Unauthenticated,
    Unavailable,
    WorkerError,
    WorkerLost,
)
from deltafront.service.fleet.session_ids import NO_SESSION, worker_of
from deltafront.service.metrics import FINISHED
from deltafront.service.request.answers import GenerateFinished, PrefillFinished, RequestEvent, ServerInfo
from deltafront.service.request.audit import Audit
from deltafront.service.request.callers import RETRY_S, Caller
from deltafront.service.request.calls import Call, CompletionRequest, GenerateRequest, PrefillRequest
from deltafront.service.request.check import Limits, checked_call, is_request_id
from deltafront.service.request.context import Accepted, Resources
from deltafront.service.request.run.choices import FORK_TTL_S, ChoicesRun
from deltafront.service.request.run.plan import generation_prompt, tokenize
from deltafront.service.request.run.request_run import RequestRun
from deltafront.service.request.text.text_budget import TextBudget
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.service.request.text.tool_calls import ToolFormat
from deltafront.service.request.ttft_clock import TtftClock
from deltafront.workers.waits import said_when_slow

log = logging.getLogger(__name__)

_FIELD_BYTES = 1 << 20
"""Bytes of a request besides its text."""
_TEXTS = 4
"""Memory for texts that wait to be tokenised, as a multiple of the longest message."""
Headers = Iterable[tuple[str, str | bytes]]
"""gRPC's metadata or HTTP's headers."""
CancelAtOtherDoors = Callable[[str, str], Awaitable[int]]
"""Takes an owner and a request id. Returns how many requests it cancelled."""


class Authenticates(Protocol):
    """Finds callers. Both methods raise Unauthenticated."""

    def caller(self, metadata: Headers) -> Caller: ...

    def caller_of(self, owner: str) -> Caller: ...


async def no_other_doors(_owner: str, _request_id: str) -> int:
    return 0


class RequestHandler:
    """Accepts and runs a door's requests. `info` is the constant part of ServerInfo."""

    def __init__(
        self,
        resources: Resources,
        limits: Limits,
        authenticator: Authenticates,
        info: ServerInfo,
        cancel_at_other_doors: CancelAtOtherDoors = no_other_doors,
    ) -> None:
        self._resources = resources
        self._limits = limits
        self._authenticator = authenticator
        self.caller_of = authenticator.caller_of
        self._info = info
        self._cancel_at_other_doors = cancel_at_other_doors
        self.text_budget = TextBudget(_TEXTS * resources.settings.max_message_bytes)
        self._accepted: set[Accepted] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all runs, also of cancelled ones that have not ended yet."""
        self._stopping = False

    @property
    def ready(self) -> bool:
        return self._resources.fleet.view.ready

    @property
    def model(self) -> str:
        return self._info.model

    @property
    def positions(self) -> int:
        return self._limits.positions

    @property
    def max_request_bytes(self) -> int:
        return 2 * self._limits.max_characters + _FIELD_BYTES

    def generation_prompt(self, request: GenerateRequest) -> str:
        """Return the text that the chat template writes before the answer; empty unless the prompt is
        messages.
        """
        return generation_prompt(self._resources.tokenizer, request.append or request.prompt)

    @property
    def is_harmony(self) -> bool:
        return self._resources.tokenizer.is_harmony

    @property
    def tool_format(self) -> ToolFormat | None:
        return self._resources.tokenizer.tool_format

    @property
    def token_bytes(self) -> TokenBytes:
        return self._resources.tokenizer.token_bytes

    @property
    def marks_reasoning(self) -> bool:
        return self._resources.settings.reasoning == "think" or self.is_harmony

    def owner(self, rpc: str, headers: Headers) -> str:
        """Authenticate a request before its message is received, and return the caller's owner id.

        Any thread may call it. Raises Unauthenticated, and audits the refused request.
        """
        try:
            return self._authenticator.caller(headers).owner
        except Unauthenticated as error:
            self._resources.metrics.ended(rpc, error.code.value, 0.0)
            Audit(rpc).write(error.code.value, 0.0)
            raise

    @contextlib.asynccontextmanager
    async def accept(
        self,
        rpc: str,
        headers: Headers,
        *,
        request_id: str = "",
        size: int = 0,
        counted: bool = True,
        known: Caller | None = None,
    ) -> AsyncIterator[Accepted]:
        """Accept a request, possibly before its message has arrived, for a `with` block. Audit it once at the
        end.

        Args:
            rpc: The name in metrics and the audit log.
            request_id: The unchecked id, for the audit log.
            size: Bytes that have arrived. For further bytes, call `text.grow`.
            counted: True if it counts against the caller's quota of requests.
            known: The caller, if it is known without headers.

        Raises:
            Unauthenticated, Overloaded
            Internal: Instead of an unexpected exception.
        """
        clock, audit, headers = TtftClock(), Audit(rpc), tuple(headers)
        audit.request_id = request_id if is_request_id(request_id) else ""
        trace = self._resources.tracing.begin(rpc, headers, lambda: clock.elapsed)
        audit.trace_id = trace.trace_id
        # CancelledError and GeneratorExit, which end the block if the client leaves, are not caught below.
        outcome: DeltafrontError | None = Cancelled("the client went away")
        concluded = False
        caller: Caller | None = None

        def conclude(error: DeltafrontError | None) -> None:
            nonlocal concluded
            if not concluded:
                concluded = True
                name, seconds = error.code.value if error else FINISHED, clock.elapsed
                self._resources.metrics.ended(rpc, name, seconds)
                if caller is not None:
                    self._resources.metrics.used(caller.label, name, audit.tokens)
                trace.conclude(audit.write(name, seconds), name, clock.intervals)

        try:
            caller = known or self._authenticator.caller(headers)
            audit.token = caller.name
            callers = self._resources.callers
            use = await callers.request(caller) if counted else callers.uncounted(caller)
            with use, self.text_budget.hold(caller.owner, size) as text:
                accepted = Accepted(
                    caller=caller,
                    clock=clock,
                    audit=audit,
                    trace=trace,
                    use=use,
                    text=text,
                    conclude=conclude,
                )
                self._accepted.add(accepted)
                try:
                    yield accepted
                finally:
                    self._accepted.discard(accepted)
            outcome = accepted.outcome
        except DeltafrontError as error:
            outcome = error
            raise
        except Exception:
            outcome = internal_error(audit)
            raise outcome from None
        finally:
            conclude(outcome)

    def run(self, accepted: Accepted, request: PrefillRequest) -> AsyncGenerator[RequestEvent, None]:
        """Run a request: yield Progress …, then PrefillFinished, or Usage, Token … and GenerateFinished.

        Raises DeltafrontError; for an invalid request at once, before the first event.
        """
        request = replace(request, service_tier=accepted.caller.tier(request.service_tier))
        call = checked_call(request, accepted.caller.owner, self._limits)
        accepted.audit.request_id = call.request_id
        accepted.audit.method = "" if call.prompt is None else call.method.name
        call = replace(call, options=replace(call.options, trace=accepted.trace.context))
        if isinstance(request, CompletionRequest) and request.answers > 1:
            return self._events(accepted, self._choices(accepted, request, call))
        return self._events(accepted, RequestRun(self._resources, call, accepted))

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._resources.tokenizer

    async def token_ids(self, accepted: Accepted, request: GenerateRequest, answer: bool = True) -> bytes:
        """Return a prompt's tokens (little-endian uint32), and run nothing. Raises DeltafrontError.

        Args:
            answer: Apply the chat template with add_generation_prompt.
        """
        call = checked_call(request, accepted.caller.owner, self._limits)
        assert call.prompt is not None, "only prompts are counted"
        return await tokenize(self._resources, accepted.text, call.prompt, appended=False, answer=answer)

    def _choices(self, accepted: Accepted, request: CompletionRequest, call: Call) -> ChoicesRun:
        others = [replace(request, prompt=prompt) for prompt in request.more_prompts]
        checked = [checked_call(other, call.owner, self._limits) for other in others]
        calls = [
            call,
            *(replace(other, request_id=call.request_id, options=call.options) for other in checked),
        ]
        ttl_s = min(FORK_TTL_S, self._limits.max_ttl_s)
        return ChoicesRun(self._resources, calls, request.choices, accepted, ttl_s)

    async def cancel_request(self, accepted: Accepted, request_id: str) -> int:
        """Cancel a caller's requests at every door, and return how many. Raises InvalidArgument."""
        if not request_id:
            raise InvalidArgument("request_id", "is empty")
        here = self.cancel_here(accepted.caller.owner, request_id)
        return here + await self._cancel_at_other_doors(accepted.caller.owner, request_id)

    def cancel_here(self, owner: str, request_id: str) -> int:
        """Cancel an owner's requests at this door, and return how many."""
        matching = [a for a in self._accepted if (a.caller.owner, a.audit.request_id) == (owner, request_id)]
        return sum(a.task is not None and a.task.cancel() for a in matching)

    async def release_session(self, accepted: Accepted, session_id: str) -> None:
        """Release a caller's session. Raises InvalidArgument, NotFound or Unavailable."""
        if not session_id:
            raise InvalidArgument("session_id", "is empty")
        worker = await self._resources.fleet.session_worker(worker_of(session_id))
        try:
            released = await worker.release_session(session_id, accepted.caller.owner)
        except WorkerLost:  # the worker died after it was found
            released = False
        except WorkerError as error:
            what = f"the session was not released: {error.message}"
            raise Unavailable(what, retry_after_s=RETRY_S) from error
        if not released:
            raise NotFound(NO_SESSION)

    async def server_info(self) -> ServerInfo:
        await self._resources.fleet.poll()
        view = self._resources.fleet.view
        groups, workers = tuple(view.groups.values()), tuple(view.workers.values())
        return replace(
            self._info,
            prefill_groups=len(groups),
            decode_workers=len(workers),
            decode_pages_total=sum(w.pages_total for w in workers),
            decode_pages_free=sum(w.pages_free for w in workers),
            prefill_pages_total=sum(g.pages_total for g in groups),
            prefill_pages_free=sum(g.pages_free for g in groups),
            page_tokens=workers[0].page_tokens if workers else 0,
        )

    async def stop(self) -> None:
        """Cancel all requests, and refuse new ones."""
        self._stopping = True
        self._resources.shadow.stop()
        with said_when_slow(lambda: f"{len(self._tasks)} requests that were cancelled"):
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
        self.text_budget.stop()

    async def _events(
        self, accepted: Accepted, run: RequestRun | ChoicesRun
    ) -> AsyncGenerator[RequestEvent, None]:
        """Run the request and yield its events. Closing the stream cancels the run."""
        if self._stopping:  # it may have been accepted before the stop
            raise Unavailable("this door is stopping: try again", retry_after_s=RETRY_S)
        accepted.outcome = Cancelled("the client went away")  # the run replaces this if it ends first
        task = accepted.task = asyncio.create_task(run.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: accepted.events.put_nowait(None))
        try:
            while (event := await accepted.events.get()) is not None:
                accepted.audit.note(event)
                yield event
            accepted.outcome = await _outcome(task, accepted.audit)
        finally:
            task.cancel()
            while not accepted.events.empty():
                self._release_unsent(accepted.events.get_nowait(), accepted.caller.owner)
            accepted.conclude(accepted.outcome)  # count it before the client sees the end
        if accepted.outcome is not None:
            raise accepted.outcome

    def _release_unsent(self, event: RequestEvent | None, owner: str) -> None:
        """Release a session whose id no client knows."""
        if isinstance(event, PrefillFinished | GenerateFinished) and event.session is not None:
            fleet, session_id = self._resources.fleet, event.session.session_id
            with contextlib.suppress(WorkerLost):
                fleet.release(fleet.worker(worker_of(session_id)), session_id, owner)


async def _outcome(task: asyncio.Task[None], audit: Audit) -> DeltafrontError | None:
    try:
        await task
    except DeltafrontError as error:
        return error
    except asyncio.CancelledError:
        if not task.cancelled():
            raise  # the consumer was cancelled, not the run
        return Cancelled("the request was cancelled")
    except Exception:
        return internal_error(audit)
    return None


def internal_error(audit: Audit) -> Internal:
    """Log the current exception, and hide it from the client."""
    log.exception("a request failed", extra={"request_id": audit.request_id})
    return Internal("the service failed; its log says why")
