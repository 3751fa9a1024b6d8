"""Finds prompts that begin with what a live session holds.

A chain has a hash for each full page, made from the hash before and the page's token ids. It starts from the
owner, the salt, the model and the method with its options, so prompts share K/V only if all of these agree.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

from ....workers.messages.events import LINK_BYTES, Prefix
from ....workers.messages.methods import PAGE_TOKENS, MethodSpec
from ....workers.messages.requests import ID_BYTES
from ....workers.roles import DecodeWorker
from ...config import DoorConfig
from ...errors import WorkerError
from ...fleet.fleet import Fleet
from ...fleet.fleet_view import not_draining

PAGE_BYTES = PAGE_TOKENS * ID_BYTES
_MIN_TOKENS = 128
"""A shorter prefix is read as fast as it is found."""
_ANSWER_WAIT_S = 0.5
"""Slow workers are left out, because the prompt can be read."""
PrefixHit = tuple[DecodeWorker, Prefix]
"""A worker, and its session that holds a prompt's first tokens."""


def hash_chain(ids: bytes, owner: str, model: str, method: MethodSpec, salt: str = "") -> bytes:
    """`ids` are little-endian uint32."""
    seed = repr((owner, salt, model, method.name, sorted(method.options)))
    link = hashlib.sha256(seed.encode()).digest()[:LINK_BYTES]
    links = []
    for end in range(PAGE_BYTES, len(ids) + 1, PAGE_BYTES):
        link = hashlib.sha256(link + ids[end - PAGE_BYTES : end]).digest()[:LINK_BYTES]
        links.append(link)
    return b"".join(links)


def cut_chain(chain: bytes, tokens: int) -> bytes:
    return chain[: tokens // PAGE_TOKENS * LINK_BYTES]


def usable_prefix(found: int, tokens: int, max_rest: int) -> int:
    """Decide how many of the `found` tokens a prompt of `tokens` tokens continues from.

    A decode worker reads the rest: at least one token, and no more than the prefix and `max_rest`.
    """
    usable = min(found, (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS)
    rest = tokens - usable
    return usable if usable >= _MIN_TOKENS and rest <= min(usable, max_rest) else 0


async def find_prefix(
    fleet: Fleet, settings: DoorConfig, owner: str, ids: bytes, chain: bytes
) -> PrefixHit | None:
    """Return the longest, and its worker.

    Draining workers are left out, because a new session would be lost there.
    """
    tokens = len(ids) // ID_BYTES
    if not settings.prefix_reuse or tokens <= _MIN_TOKENS:
        return None
    names = [stats.name for stats in not_draining(tuple(fleet.view.workers.values()))]
    answers = await asyncio.gather(*(_ask(fleet, name, owner, chain) for name in names))
    hits = [
        (worker, replace(found, tokens=usable))
        for worker, found in filter(None, answers)
        if (usable := usable_prefix(found.tokens, tokens, settings.prefix_rest_tokens))
    ]
    return max(hits, key=lambda hit: hit[1].tokens, default=None)


async def _ask(fleet: Fleet, name: str, owner: str, chain: bytes) -> PrefixHit | None:
    try:
        worker = fleet.worker(name)
        async with asyncio.timeout(_ANSWER_WAIT_S):
            prefix = await worker.find_prefix(owner, chain)
    except (WorkerError, TimeoutError):
        return None
    return None if prefix is None else (worker, prefix)
