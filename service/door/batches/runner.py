"""Chooses the batches that this door works on: of each caller the oldest, if this door has the lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from deltafront.service.door.batches.asking import Asker
from deltafront.service.door.batches.catalog import Catalog
from deltafront.service.door.batches.lease import TURN_S, DoorLease, LeaseLost
from deltafront.service.door.batches.work import BatchWork

log = logging.getLogger(__name__)


class BatchRunner:
    """Works on batches, one of each caller at a time.

    Args:
        width: The most lines that are asked at once. Callers share them equally.
        count: Counts answered lines: whether they succeeded, and their number.
    """

    def __init__(
        self,
        catalog: Catalog,
        asker: Asker,
        door: str,
        width: int,
        max_line_bytes: int,
        count: Callable[[bool, int], None],
        turn_s: float = TURN_S,
    ) -> None:
        self._catalog, self._storage, self._asker = catalog, catalog.storage, asker
        self._door, self._width, self._max_line_bytes = door, width, max_line_bytes
        self._count, self._turn_s = count, turn_s
        self._slots = asyncio.Semaphore(width)
        self._lease = DoorLease(self._storage, door)
        self._works: dict[str, asyncio.Task[None]] = {}
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Store what is answered, and leave the rest to the next door."""
        running, self._running = self._running, None
        if running is None:
            return
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self._end_works()
        try:
            await self._storage.run(self._lease.release)
        except Exception:
            log.exception("the lease of batches was not released: another door waits until it expires")
        self._storage.stop()

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:
                log.exception("the storage of batches (door.batches) does not answer")
            await asyncio.sleep(self._turn_s)

    async def _turn(self) -> None:
        if not await self._storage.run(self._lease.hold):
            await self._end_works()
            return
        self._works = {owner: work for owner, work in self._works.items() if not work.done()}
        for owner, batch_id in await self._storage.run(self._catalog.queue):
            if owner not in self._works:
                self._works[owner] = asyncio.create_task(self._work(owner, batch_id))

    async def _work(self, owner: str, batch_id: str) -> None:
        try:
            batch = await self._storage.run(self._catalog.batch, owner, batch_id)
            work = BatchWork(
                self._catalog,
                self._asker,
                owner,
                batch,
                door=self._door,
                slots=self._slots,
                width=self._width,
                max_line_bytes=self._max_line_bytes,
                check=self._lease.check,
                count=self._count,
            )
            await work.run()
        except LeaseLost:
            log.warning("this door works on %s no more: it could not renew its lease", batch_id)
        except Exception:
            log.exception("the work on %s was interrupted, and begins again", batch_id)

    async def _end_works(self) -> None:
        for work in self._works.values():
            work.cancel()
        await asyncio.gather(*self._works.values(), return_exceptions=True)
        self._works = {}
