"""Polls the workers for a door, and renews and cancels its requests on them. Imports no Ray."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from deltafront.service.errors import NotFound, Unavailable, WorkerError, WorkerLost
from deltafront.service.fleet.fleet_view import Charge, FleetView, latest_states, without
from deltafront.service.fleet.session_ids import NO_SESSION
from deltafront.workers.messages.states import DecodeStats, GroupStats
from deltafront.workers.roles import DecodeWorker, Group, Leased
from deltafront.workers.waits import said_when_slow

_S = TypeVar("_S", GroupStats, DecodeStats)
_T = TypeVar("_T")

log = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 5.0
"""Timeout of a poll. A slower worker keeps its last known state."""
_NEW_TIMEOUT_S = 2.0
"""Timeout of a poll for a new worker, which may still be loading."""
_ASK_TIMEOUT_S = 0.5
"""Timeout of a poll before a request is refused, because its client waits."""
_STOP_TIMEOUT_S = 1.0
"""How long a stopping door may take to tell workers what it has cancelled."""
_DISCOVERY_FACTOR = 4
"""While a role has no worker, the door looks for one this many times as often."""


@dataclass(frozen=True)
class WorkerHandles:
    """Workers by actor name. Their calls raise WorkerLost or WorkerFailed."""

    groups: Mapping[str, Group]
    workers: Mapping[str, DecodeWorker]


class Directory(Protocol):
    async def find(self) -> WorkerHandles:
        """Find all workers. Raises Unavailable if the lookup fails."""


class Fleet:
    """Polls workers, and renews and cancels requests on them.

    Args:
        pairing: `workers.settings.pairing`. Workers with another pairing are ignored.
    """

    def __init__(
        self,
        directory: Directory,
        observe: Callable[[FleetView], None],
        refresh_s: float = 1.0,
        renew_s: float = 1.0,
        pairing: str = "",
    ) -> None:
        self._directory = directory
        self._observe = observe
        self._refresh_s = refresh_s
        self._renew_s = renew_s
        self._pairing = pairing
        self._others: bool | None = None
        """True if workers of other configurations exist; None before the first poll."""
        self._handles = WorkerHandles({}, {})
        self._held: dict[str, set[str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._repeating: Sequence[asyncio.Task[None]] = ()
        self._changed = asyncio.Event()
        self._polls = 0
        self._charges: list[Charge] = []
        """Charges made during a poll, because its answers may be older than they are."""
        self._forgotten: list[str] = []
        """Workers forgotten during a poll."""
        self.view = FleetView()
        self._shared_poll = SingleFlight(lambda: self.poll(_ASK_TIMEOUT_S), self.spawn)
        self._shared_refresh = SingleFlight(self.refresh, self.spawn)

    def start(self) -> None:
        self._repeating = (
            self.spawn(self._repeat(self.refresh, lambda: self.refresh_pause)),
            self.spawn(self._repeat(self._renew, lambda: self._renew_s)),
        )

    async def stop(self) -> None:
        """Stop polling. Pending cancellations are still sent to workers."""
        for task in self._repeating:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
        with said_when_slow(lambda: f"calls of workers that were cancelled: {_names(self._tasks)}"):
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run a coroutine as a background task, and keep a reference so that it is not garbage-collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def refresh_pause(self) -> float:
        return self._refresh_s if self.view.ready else self._refresh_s / _DISCOVERY_FACTOR

    async def refresh(self) -> None:
        """Find workers and poll them."""
        await self._poll(await self._directory.find())
        self._changed.set()
        self._changed = asyncio.Event()

    async def poll(self, timeout_s: float = _STATS_TIMEOUT_S) -> None:
        """Ask the known workers for their states, and drop dead workers."""
        await self._poll(self._handles, timeout_s, known=True)

    async def poll_shared(self) -> None:
        """Poll the workers' states. Concurrent callers share a poll that starts after their calls."""
        await self._shared_poll.run()

    async def _poll(
        self, handles: WorkerHandles, timeout_s: float = _STATS_TIMEOUT_S, known: bool = False
    ) -> None:
        charges, forgotten = len(self._charges), len(self._forgotten)
        self._polls += 1
        try:
            groups, workers = await asyncio.gather(
                self._states({n: g.stats for n, g in handles.groups.items()}, self.view.groups, timeout_s),
                self._states({n: w.stats for n, w in handles.workers.items()}, self.view.workers, timeout_s),
            )
            for name in self._forgotten[forgotten:]:
                groups.pop(name, None)
                workers.pop(name, None)
            if known:
                groups = latest_states(handles.groups, groups, self._handles.groups, self.view.groups)
                workers = latest_states(handles.workers, workers, self._handles.workers, self.view.workers)
                handles = self._handles
            others = len(groups) + len(workers)
            groups, workers = self._own(groups), self._own(workers)
            others -= len(groups) + len(workers)
            view = functools.reduce(FleetView.charged, self._charges[charges:], FleetView(groups, workers))
        finally:
            self._polls -= 1
            if not self._polls:
                self._charges.clear()
                self._forgotten.clear()
        self._handles = WorkerHandles(
            {name: group for name, group in handles.groups.items() if name in groups},
            {name: worker for name, worker in handles.workers.items() if name in workers},
        )
        self.view, self._others = view, others > 0
        self._observe(view)

    def _own(self, states: Mapping[str, _S]) -> dict[str, _S]:
        return {name: state for name, state in states.items() if state.pairing in ("", self._pairing)}

    async def wait_to_take_over(self) -> None:
        """Wait until this door can serve, or until workers of other configurations are gone.

        Until this call returns, Serve keeps the doors that this one replaces.
        """
        while self._others is None or (self._others and not self.view.ready):
            await self._changed.wait()

    async def wait_until_ready(self, timeout_s: float) -> FleetView:
        """Wait until there is a worker of each role. Raises Unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.view.ready:
                    await self._changed.wait()
        if not self.view.ready:
            missing = "decode worker" if self.view.groups else "prefill group"
            raise Unavailable(f"no {missing} is running; they may be starting", retry_after_s=5.0)
        return self.view

    def group(self, name: str) -> Group:
        return _get(self._handles.groups, name)

    def worker(self, name: str) -> DecodeWorker:
        return _get(self._handles.workers, name)

    async def session_worker(self, name: str) -> DecodeWorker:
        """Return the worker that holds a session. Raises NotFound: sessions die with their worker."""
        if name not in self._handles.workers:
            await self._shared_refresh.run()
        worker = self._handles.workers.get(name)
        if worker is None:
            raise NotFound(f"{NO_SESSION} (or its decode worker was restarted): send the prompt again")
        return worker

    def forget(self, name: str) -> None:
        """Stop using a failed worker until it is found again."""
        self._handles = WorkerHandles(
            without(self._handles.groups, name), without(self._handles.workers, name)
        )
        self.view = FleetView(without(self.view.groups, name), without(self.view.workers, name))
        if self._polls:
            self._forgotten.append(name)

    def charge(self, charge: Charge) -> None:
        """Add an admitted request's load to the view at once, since the next poll is up to a second away."""
        self.view = self.view.charged(charge)
        if self._polls:
            self._charges.append(charge)

    def hold_lease(self, worker: Leased, request_id: str) -> None:
        """Renew a request's lease on a worker until `drop_lease`."""
        self._held.setdefault(worker.name, set()).add(request_id)

    def drop_lease(self, worker: Leased, request_id: str) -> None:
        held = self._held.get(worker.name, set())
        held.discard(request_id)
        if not held:
            self._held.pop(worker.name, None)

    def cancel(self, worker: Leased, request_id: str) -> None:
        """Cancel a request in the background, and stop renewing it."""
        self.drop_lease(worker, request_id)
        self._notify(worker.cancel(request_id), f"cancel {request_id} on {worker.name}")

    def confirm(self, worker: Leased, request_id: str) -> None:
        """Tell the worker that the door has received the request's result, so that the worker keeps its
        session."""
        self._notify(worker.renew((request_id,)), f"confirm {request_id} on {worker.name}")

    def release(self, worker: DecodeWorker, session_id: str, owner: str) -> None:
        """Release a session whose id no client has."""
        self._notify(worker.release_session(session_id, owner), f"release a session on {worker.name}")

    def _notify(self, call: Awaitable[Any], description: str) -> None:
        self.spawn(_log_errors(call, description)).set_name(description)

    async def _renew(self) -> None:
        """Renew the leases of held requests. A draining worker of last resort gets renewals even without
        requests, so that it keeps running."""
        workers: dict[str, Leased] = {**self._handles.groups, **self._handles.workers}
        names = workers.keys() & (self._held.keys() | self.view.last_resort)

        async def renew(name: str) -> None:
            with contextlib.suppress(TimeoutError):  # a hanging worker must not delay the others' renewals
                async with asyncio.timeout(self._renew_s):
                    await workers[name].renew(tuple(self._held.get(name, ())))

        await asyncio.gather(*(_log_errors(renew(name), f"renew on {name}") for name in names))

    async def _states(
        self, stats: Mapping[str, Callable[[], Awaitable[_S]]], last: Mapping[str, _S], timeout_s: float
    ) -> dict[str, _S]:
        answers = await asyncio.gather(
            *(_state(ask, last.get(name), timeout_s) for name, ask in stats.items())
        )
        named = zip(stats, answers, strict=True)
        return {name: replace(state, name=name) for name, state in named if state is not None}

    async def _repeat(self, work: Callable[[], Awaitable[None]], pause_s: Callable[[], float]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("polling the workers failed; trying again")
            await asyncio.sleep(pause_s())


async def _state(ask: Callable[[], Awaitable[_S]], last: _S | None, timeout_s: float) -> _S | None:
    """Ask a worker for its state. A slow worker keeps its last state; a dead worker has none."""
    try:
        async with asyncio.timeout(min(_NEW_TIMEOUT_S, timeout_s) if last is None else timeout_s):
            return await ask()
    except WorkerError:
        return None
    except TimeoutError:
        return last


def _names(tasks: Iterable[asyncio.Task[Any]]) -> str:
    return ", ".join(sorted(task.get_name() for task in tuple(tasks)))


def _get(workers: Mapping[str, _T], name: str) -> _T:
    if name not in workers:
        raise WorkerLost(name, f"{name} is gone")
    return workers[name]


async def _log_errors(call: Awaitable[Any], description: str) -> None:
    try:
        await call
    except WorkerError as error:
        log.info("%s: %s", description, error.message)


class SingleFlight:
    """Shares one run of a task among concurrent callers.

    Args:
        start: Starts a task and keeps a reference to it.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._work = work
        self._start = start
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait for a run that begins after this call. Concurrent callers share the run."""
        if self._next is None:
            self._next = self._start(self._run_after(self._running))
        await asyncio.shield(self._next)

    async def _run_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        await self._work()
