"""What an edge may ask. Every request is authenticated, checked, counted and run, and ends with exactly one
outcome and one line in the audit log.

An edge (a protocol) does three things with a request:

1. It calls `accept` with the headers. The block that follows is the request's life.
2. Inside, it reads the message into a `PrefillRequest` or `GenerateRequest` and hands that to `prefill` or
   `generate`. It keeps no reference to the text.
3. It turns each event into a message of its own, closes the stream (`aclose`) when its client leaves, and
   turns the DeltafrontError that may end the block into its own status, `retry_after_s` included.

A run puts its events into a queue, so that whoever reads the stream may vanish at any moment: closing the
stream cancels the run, wherever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace

from ..errors import Cancelled, DeltafrontError, Internal, InvalidArgument, NotFound, WorkerLost
from ..fleet.sessions import NO_SESSION, worker_of
from ..metrics import FINISHED
from .accepted import Accepted
from .answers import GenerateFinished, PrefillFinished, RequestEvent, ServerInfo
from .audit import Audit
from .callers import Caller
from .calls import Call, GenerateRequest, PrefillRequest
from .check import Limits, fit_id, generate_call, prefill_call
from .resources import Resources
from .run.request_run import RequestRun
from .text.text_budget import TextBudget
from .timings import TtftClock

log = logging.getLogger(__name__)

_BESIDE_TEXT = 1 << 20
"""Bytes of a request that are not its text."""
Headers = Iterable[tuple[str, str | bytes]]
"""gRPC's metadata, HTTP's headers."""
Authenticate = Callable[[Headers], Caller]
"""Raises Unauthenticated."""
EndElsewhere = Callable[[str, str], Awaitable[int]]
"""Ends an owner's requests of an id at the other doors; returns how many there were."""


async def nowhere_else(_owner: str, _request_id: str) -> int:
    """`EndElsewhere` of a door that is alone."""
    return 0


class RequestHandler:
    """The requests of one door. about: the server without its workers."""

    def __init__(
        self,
        resources: Resources,
        limits: Limits,
        authenticate: Authenticate,
        about: ServerInfo,
        end_elsewhere: EndElsewhere = nowhere_else,
    ) -> None:
        self._resources = resources
        self._limits = limits
        self._authenticate = authenticate
        self._about = about
        self._end_elsewhere = end_elsewhere
        self.text_budget = TextBudget(resources.settings.text_bytes)
        self._accepted: set[Accepted] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """Also those whose stream was left: they end a moment later."""

    @property
    def ready(self) -> bool:
        """Whether every configured role has at least one started member."""
        return self._resources.fleet.view.ready

    @property
    def model(self) -> str:
        """The id of the model that is served."""
        return self._about.model

    @property
    def max_request_bytes(self) -> int:
        """A longer request cannot fit the model, with prompt, appended text and all fields."""
        return 2 * self._limits.most_characters + _BESIDE_TEXT

    def owner(self, headers: Headers) -> str:
        """Who sends these headers. Raises Unauthenticated."""
        return self._authenticate(headers).owner

    @contextlib.asynccontextmanager
    async def accept(
        self, rpc: str, headers: Headers, *, request_id: str = "", size: int = 0
    ) -> AsyncIterator[Accepted]:
        """A request, while the block runs. However the block ends, it is counted and audited once.

        Args:
            rpc: the method's name in metrics and the audit log.
            request_id: what the edge knows of it before it is checked, for the audit log.
            size: bytes of the request as it came.
        Raises: Unauthenticated; Overloaded where its text has no room; Internal in place of what nobody
            foresaw.
        """
        clock, audit, headers = TtftClock(), Audit(rpc), tuple(headers)
        audit.request_id = request_id if fit_id(request_id) else ""
        trace = self._resources.tracing.begin(rpc, headers, lambda: clock.elapsed)
        audit.trace_id = trace.trace_id
        outcome: DeltafrontError | None = Cancelled("the client went away")
        try:
            caller = self._authenticate(headers)
            audit.caller = caller.name
            with self.text_budget.hold(caller.owner, size) as text:
                accepted = Accepted(caller=caller, clock=clock, audit=audit, trace=trace, text=text)
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
            outcome = _unforeseen()
            raise outcome from None
        finally:
            name, seconds = outcome.code.value if outcome else FINISHED, clock.elapsed
            self._resources.metrics.ended(rpc, name, seconds)
            trace.conclude(audit.write(name, seconds), name, clock.intervals)

    def prefill(self, accepted: Accepted, request: PrefillRequest) -> AsyncGenerator[RequestEvent, None]:
        """Progress …, PrefillFinished. Raises DeltafrontError, at once for a request that is wrong."""
        return self._start(accepted, prefill_call(request, accepted.owner, self._limits))

    def generate(self, accepted: Accepted, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """Progress …, Usage, Token …, GenerateFinished. Raises DeltafrontError, at once for a request that is
        wrong."""
        return self._start(accepted, generate_call(request, accepted.owner, self._limits))

    async def cancel_request(self, accepted: Accepted, request_id: str) -> int:
        """End the caller's requests of this id at every door; how many there were. Raises InvalidArgument."""
        if not request_id:
            raise InvalidArgument("request_id", "is empty")
        here = self.end(accepted.owner, request_id)
        return here + await self._end_elsewhere(accepted.owner, request_id)

    def end(self, owner: str, request_id: str) -> int:
        """Cancel this door's requests of an owner's id; how many there were."""
        named = [one for one in self._accepted if (one.owner, one.request_id) == (owner, request_id)]
        return sum(one.task is not None and one.task.cancel() for one in named)

    async def release_session(self, accepted: Accepted, session_id: str) -> None:
        """Free a session's pages now. Raises InvalidArgument or NotFound."""
        if not session_id:
            raise InvalidArgument("session_id", "is empty")
        worker = await self._resources.fleet.session_worker(worker_of(session_id))
        if not await worker.release_session(session_id, accepted.owner):
            raise NotFound(NO_SESSION)

    async def server_info(self) -> ServerInfo:
        """The server and its workers now."""
        await self._resources.fleet.poll()
        view = self._resources.fleet.view
        groups, workers = tuple(view.groups.values()), tuple(view.workers.values())
        return replace(
            self._about,
            prefill_groups=len(groups),
            decode_workers=len(workers),
            decode_pages_total=sum(w.pages_total for w in workers),
            decode_pages_free=sum(w.pages_free for w in workers),
            prefill_pages_total=sum(g.pages_total for g in groups),
            prefill_pages_free=sum(g.pages_free for g in groups),
            page_tokens=workers[0].page_tokens if workers else 0,
        )

    async def stop(self) -> None:
        """Cancel every run; returns when all have ended."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self.text_budget.stop()

    def _start(self, accepted: Accepted, call: Call) -> AsyncGenerator[RequestEvent, None]:
        accepted.request_id = accepted.audit.request_id = call.request_id
        accepted.audit.method = "" if call.prompt is None else call.method.name
        call = replace(call, trace=accepted.trace.context)
        return self._events(accepted, RequestRun(self._resources, call, accepted))

    async def _events(self, accepted: Accepted, run: RequestRun) -> AsyncGenerator[RequestEvent, None]:
        """A run's events until it ends. It is cancelled where the stream is closed before."""
        accepted.outcome = Cancelled("the client went away")
        task = accepted.task = asyncio.create_task(run.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: accepted.events.put_nowait(None))
        try:
            while (event := await accepted.events.get()) is not None:
                if isinstance(event, PrefillFinished | GenerateFinished):
                    event = replace(event, trace_id=accepted.trace.trace_id)
                accepted.audit.note(event)
                yield event
            accepted.outcome = await _outcome(task)
        finally:
            task.cancel()
            while not accepted.events.empty():
                self._release_unsent(accepted.events.get_nowait(), accepted.owner)
        if accepted.outcome is not None:
            raise accepted.outcome

    def _release_unsent(self, event: RequestEvent | None, owner: str) -> None:
        """Free the session of an event that the client left before: nobody knows it."""
        if isinstance(event, PrefillFinished | GenerateFinished) and event.session is not None:
            fleet, session_id = self._resources.fleet, event.session.session_id
            with contextlib.suppress(WorkerLost):
                fleet.release(fleet.worker(worker_of(session_id)), session_id, owner)


async def _outcome(task: asyncio.Task[None]) -> DeltafrontError | None:
    """How a finished run ended."""
    try:
        await task
    except DeltafrontError as error:
        return error
    except asyncio.CancelledError:
        if not task.cancelled():
            raise  # it is us who are cancelled
        return Cancelled("the request was cancelled")
    except Exception:
        return _unforeseen()
    return None


def _unforeseen() -> Internal:
    """Stands for the exception being handled, which is logged here and hidden from the client."""
    log.exception("a request failed")
    return Internal("the service failed; its log says why")
