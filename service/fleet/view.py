"""The workers as the door knows them: who is alive, how full they are, and what we keep alive there.

Free of Ray; `workers/roles.py` says what workers can be asked, `directory.py` how they are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...workers.messages.states import DecodeStats, GroupStats
from ...workers.roles import DecodeWorker, Group, Leased
from ..errors import NotFound, Unavailable, WorkerError, WorkerLost
from .directory import Directory, Found
from .known import Charge, View, newest, without
from .sessions import NO_SESSION
from .single_flight import Crowd

_S = TypeVar("_S", GroupStats, DecodeStats)
_T = TypeVar("_T")

log = logging.getLogger(__name__)

_STATS_PATIENCE_S = 5.0
"""A worker that answers later keeps its last known state; only a dead one is dropped."""
_NEW_PATIENCE_S = 2.0
"""One without such a state may be loading, and must not keep a look at the others waiting for longer."""
_ASK_PATIENCE_S = 0.5
"""The same while a client waits to hear whether it is refused."""
_LAST_WORDS_S = 1.0
"""For workers to hear what a door that stops has cancelled."""
_HURRY = 4
"""So many times as often the door looks for workers while some role has none."""


class Fleet:
    """Polls workers, renews what is in progress, and cancels what is not any more.

    pairing: of the door's configuration (`workers.settings.pairing`). Workers of another, which it replaces
    or is replaced by, are left to their own doors.
    """

    def __init__(
        self,
        directory: Directory,
        observe: Callable[[View], None],
        refresh_s: float = 1.0,
        renew_s: float = 1.0,
        pairing: str = "",
    ) -> None:
        self._directory = directory
        self._observe = observe
        self._refresh_s = refresh_s
        self._renew_s = renew_s
        self._pairing = pairing
        self._strangers: bool | None = None
        """Whether workers of another configuration are there; None before the first look."""
        self._found = Found({}, {})
        self._held: dict[str, set[str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._repeating: Sequence[asyncio.Task[None]] = ()
        self._changed = asyncio.Event()
        self._polls = 0
        self._charges: list[Charge] = []
        """Those made while a poll was asking: its answers may be older."""
        self._forgotten: list[str] = []
        """Workers that showed themselves gone or failing while a poll was asking."""
        self.view = View()
        self._crowd = Crowd(lambda: self.poll(_ASK_PATIENCE_S), self.spawn)
        self._search = Crowd(self.refresh, self.spawn)

    def start(self) -> None:
        self._repeating = (
            self.spawn(self._repeat(self.refresh, lambda: self.refresh_pause)),
            self.spawn(self._repeat(self._renew, lambda: self._renew_s)),
        )

    async def stop(self) -> None:
        """Look at workers no more. They still hear what has ended, if they hear it in a moment."""
        for task in self._repeating:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run in the background; kept, so that it is not collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def refresh_pause(self) -> float:
        """Seconds from one look at all workers to the next."""
        return self._refresh_s if self.view.ready else self._refresh_s / _HURRY

    async def refresh(self) -> None:
        """Look for workers and ask how they are."""
        await self._poll(await self._directory.find())
        self._changed.set()
        self._changed = asyncio.Event()

    async def poll(self, patience_s: float = _STATS_PATIENCE_S) -> None:
        """Ask the known workers how they are; dead ones are dropped. Those that `refresh` finds meanwhile
        stay as it found them."""
        await self._poll(self._found, patience_s, known=True)

    async def ask(self) -> None:
        """Know how the workers are now: no answer is older than this call, and a crowd of callers shares one
        question. Who does not answer in time keeps its last known state."""
        await self._crowd.ask()

    async def _poll(self, found: Found, patience_s: float = _STATS_PATIENCE_S, known: bool = False) -> None:
        seen, forgotten = len(self._charges), len(self._forgotten)
        self._polls += 1
        try:
            groups, workers = await asyncio.gather(
                self._states({n: g.stats for n, g in found.groups.items()}, self.view.groups, patience_s),
                self._states({n: w.stats for n, w in found.workers.items()}, self.view.workers, patience_s),
            )
            for name in self._forgotten[forgotten:]:
                groups.pop(name, None)
                workers.pop(name, None)
            if known:
                groups = newest(found.groups, groups, self._found.groups, self.view.groups)
                workers = newest(found.workers, workers, self._found.workers, self.view.workers)
                found = self._found
            others = len(groups) + len(workers)
            groups, workers = self._own(groups), self._own(workers)
            others -= len(groups) + len(workers)
            view = functools.reduce(View.charged, self._charges[seen:], View(groups, workers))
        finally:
            self._polls -= 1
            if not self._polls:
                self._charges.clear()
                self._forgotten.clear()
        self._found = Found(
            {name: link for name, link in found.groups.items() if name in groups},
            {name: link for name, link in found.workers.items() if name in workers},
        )
        self.view, self._strangers = view, others > 0
        self._observe(view)

    def _own(self, states: Mapping[str, _S]) -> dict[str, _S]:
        """Those that this door may send prompts to."""
        return {name: one for name, one in states.items() if one.pairing in ("", self._pairing)}

    async def relieved(self) -> None:
        """Returns when this door can serve, or nobody of another configuration is left to do it meanwhile: a
        door that takes the place of one of theirs too early would keep its clients waiting."""
        while self._strangers is None or (self._strangers and not self.view.ready):
            await self._changed.wait()

    async def ready(self, patience_s: float) -> View:
        """The current state, as soon as there is a worker of each kind. Raises Unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not self.view.ready:
                    await self._changed.wait()
        if not self.view.ready:
            missing = "decode worker" if self.view.groups else "prefill group"
            raise Unavailable(f"no {missing} is running; they may be starting", retry_after_s=5.0)
        return self.view

    def group(self, name: str) -> Group:
        link = self._found.groups.get(name)
        if link is None:
            raise WorkerLost(name, f"{name} is gone")
        return link

    def worker(self, name: str) -> DecodeWorker:
        link = self._found.workers.get(name)
        if link is None:
            raise WorkerLost(name, f"{name} is gone")
        return link

    async def session_worker(self, name: str) -> DecodeWorker:
        """The worker of a session; a crowd that asks for one that is not known shares one look. Raises
        NotFound: sessions die with their worker."""
        if name not in self._found.workers:
            await self._search.ask()
        link = self._found.workers.get(name)
        if link is None:
            raise NotFound(f"{NO_SESSION} (or its decode worker was restarted): send the prompt again")
        return link

    def forget(self, name: str) -> None:
        """A call showed that this worker is gone or failing; do not choose it until it is found again."""
        self._found = Found(without(self._found.groups, name), without(self._found.workers, name))
        self.view = View(without(self.view.groups, name), without(self.view.workers, name))
        if self._polls:
            self._forgotten.append(name)

    def charge(self, charge: Charge) -> None:
        """Count an admitted request at once: the next poll is up to a second away."""
        self.view = self.view.charged(charge)
        if self._polls:
            self._charges.append(charge)

    def hold(self, link: Leased, request_id: str) -> None:
        """Renew this request there until `drop`."""
        self._held.setdefault(link.name, set()).add(request_id)

    def drop(self, link: Leased, request_id: str) -> None:
        held = self._held.get(link.name, set())
        held.discard(request_id)
        if not held:
            self._held.pop(link.name, None)

    def cancel(self, link: Leased, request_id: str) -> None:
        """Stop renewing and cancel, without making anybody wait for it."""
        self.drop(link, request_id)
        self.spawn(self._quietly(link.cancel(request_id), f"cancel {request_id} on {link.name}"))

    def confirm(self, link: Leased, request_id: str) -> None:
        """The door has heard how the request ended, so that a session kept on the way may stay."""
        self.spawn(self._quietly(link.renew((request_id,)), f"confirm {request_id} on {link.name}"))

    def release(self, link: DecodeWorker, session_id: str, owner: str) -> None:
        """Drop a session that nobody was told of."""
        self.spawn(
            self._quietly(link.release_session(session_id, owner), f"release a session on {link.name}")
        )

    async def _renew(self) -> None:
        """Also where nothing is held, if nobody else is there: one that drains is not to go yet."""
        links: dict[str, Leased] = {**self._found.groups, **self._found.workers}
        calls = [
            self._quietly(
                self._in_time(links[name].renew(tuple(self._held.get(name, ())))), f"renew on {name}"
            )
            for name in self._held.keys() | self.view.last_resort
            if name in links
        ]
        await asyncio.gather(*calls)

    async def _in_time(self, renewal: Awaitable[None]) -> None:
        """One worker that hangs must not keep the others' leases from being renewed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._renew_s):
                await renewal

    async def _states(
        self, asks: Mapping[str, Callable[[], Awaitable[_S]]], last: Mapping[str, _S], patience_s: float
    ) -> dict[str, _S]:
        """Every live worker's state under its actor name; a slow one keeps its last."""
        answers = await asyncio.gather(
            *(_answer(ask, last.get(name), patience_s) for name, ask in asks.items())
        )
        both = zip(asks, answers, strict=True)
        return {name: replace(state, name=name) for name, state in both if state is not None}

    async def _quietly(self, call: Awaitable[Any], what: str) -> None:
        try:
            await call
        except WorkerError as error:
            log.info("%s: %s", what, error.message)

    async def _repeat(self, work: Callable[[], Awaitable[None]], pause_s: Callable[[], float]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("looking after the workers failed; trying again")
            await asyncio.sleep(pause_s())


async def _answer(ask: Callable[[], Awaitable[_S]], last: _S | None, patience_s: float) -> _S | None:
    try:
        async with asyncio.timeout(min(_NEW_PATIENCE_S, patience_s) if last is None else patience_s):
            state = await ask()
    except WorkerError:
        return None
    except TimeoutError:
        return last
    return state
