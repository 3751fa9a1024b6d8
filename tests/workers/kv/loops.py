"""Runs the background loops of tiers."""

from __future__ import annotations

import asyncio

from deltafront.workers.kv.pages.host_states import HostStates
from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.store_tier import StoreTier


async def settle(tier: HostTier | HostStates | StoreTier) -> None:
    """Run the loop of a tier until nothing waits there."""
    run = asyncio.create_task(tier.run())
    while tier.busy:
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
