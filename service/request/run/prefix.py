"""Prompts that begin with what a live session holds: found by a chain of hashes, without being told.

A chain has a link for each full page of a prompt, made of the link before and the page's token ids. It
begins with who owns the prompt, the request's `cache_salt`, the model, and the method with its options: where
any of these differ, no link is the same. So K/V is shared only where it would have been computed the same,
and never between owners or salts.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace

from ....workers.messages.events import LINK_BYTES, Prefix
from ....workers.messages.methods import PAGE_TOKENS, MethodSpec
from ....workers.messages.requests import ID_BYTES, GenerateJob, Reservation
from ....workers.roles import DecodeWorker
from ...config import DoorConfig
from ...errors import WorkerError, WorkerLost
from ...fleet.known import staying
from ...fleet.view import Fleet

PAGE_BYTES = PAGE_TOKENS * ID_BYTES
_LEAST_TOKENS = 128
"""A shorter prefix is read as fast as it is found."""
_PATIENCE_S = 0.5
"""A worker that answers later is not waited for: the prompt can be read as well."""


@dataclass(frozen=True)
class FoundPrefix:
    """A worker whose session holds the first `tokens` of a prompt."""

    worker: DecodeWorker
    session_id: str
    tokens: int

    def reservation(self, whole: Reservation) -> Reservation:
        """For what is left of a prompt. Where there is no room for that, the whole is read elsewhere."""
        rest = replace(whole, prompt_tokens=whole.prompt_tokens + whole.append_tokens - self.tokens)
        return replace(
            rest, append_tokens=0, session_id=self.session_id, prefix_tokens=self.tokens, wait=False
        )

    def job(self, whole: GenerateJob, ids: bytes) -> GenerateJob:
        """ids: the whole prompt, and what has been answered. The session has those of its own."""
        rest = ids[self.tokens * ID_BYTES :]
        return replace(whole, append_ids=rest, session_id=self.session_id, prompt_ids=b"")


def chain_of(ids: bytes, owner: str, model: str, method: MethodSpec, salt: str = "") -> bytes:
    """The links of a prompt's full pages, LINK_BYTES each. ids: little-endian uint32."""
    seed = repr((owner, salt, model, method.name, sorted(method.options)))
    link = hashlib.sha256(seed.encode()).digest()[:LINK_BYTES]
    links = []
    for end in range(PAGE_BYTES, len(ids) + 1, PAGE_BYTES):
        link = hashlib.sha256(link + ids[end - PAGE_BYTES : end]).digest()[:LINK_BYTES]
        links.append(link)
    return b"".join(links)


def links_of(chain: bytes, tokens: int) -> bytes:
    """The chain of a prompt's first tokens."""
    return chain[: tokens // PAGE_TOKENS * LINK_BYTES]


def worth_it(found: int, tokens: int, most_rest: int) -> int:
    """How many of `found` tokens a prompt of `tokens` should continue from; 0: none, because the rest, which
    a decode worker reads, is longer than these or than most_rest. One token at least is left to read."""
    usable = min(found, (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS)
    rest = tokens - usable
    return usable if usable >= _LEAST_TOKENS and rest <= min(usable, most_rest) else 0


async def find(
    fleet: Fleet, settings: DoorConfig, owner: str, ids: bytes, chain: bytes
) -> FoundPrefix | None:
    """The longest prefix that a decode worker holds in a session of the owner's, if it is worth continuing
    from. Not of one that drains: what is continued there may be kept there, and would go with it."""
    tokens = len(ids) // ID_BYTES
    if not settings.prefix_reuse or tokens <= _LEAST_TOKENS:
        return None
    there = staying(tuple(fleet.view.workers.values()))
    workers = [worker for one in there if (worker := _living(fleet, one.name)) is not None]
    answers = await asyncio.gather(*(_ask(worker, owner, chain) for worker in workers))
    found = [
        FoundPrefix(worker, answer.session_id, usable)
        for worker, answer in zip(workers, answers, strict=True)
        if answer is not None and (usable := worth_it(answer.tokens, tokens, settings.prefix_rest_tokens))
    ]
    return max(found, key=lambda one: one.tokens, default=None)


def _living(fleet: Fleet, name: str) -> DecodeWorker | None:
    try:
        return fleet.worker(name)
    except WorkerLost:
        return None


async def _ask(worker: DecodeWorker, owner: str, chain: bytes) -> Prefix | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await worker.find_prefix(owner, chain)
    except (WorkerError, TimeoutError):
        return None
