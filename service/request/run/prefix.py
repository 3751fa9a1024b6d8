"""Finds a prompt's prefix in the decode workers' prefix caches, and decides which worker prefills the rest.

The key is a root and a chain of hashes (`workers/messages/prompts.py`). The root names the owner, the salt,
the model and the method with its options, so prompts share a KV cache only if all of these agree. The KV
cache of dense attention serves every method.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.methods import MethodSpec, is_exact, lasting_tokens, resume_step
from deltafront.service.errors import WorkerError
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.fleet.fleet_view import not_draining
from deltafront.workers.messages.events import Prefix
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey, chain_of, root_of
from deltafront.workers.messages.requests import ID_BYTES
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.states import DecodeStats, GroupStats, PrefillCost
from deltafront.workers.model.calibrated.levels import lengths_of_thresholds
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.roles import DecodeWorker

_MIN_TOKENS = 128
"""Prefilling a shorter prefix takes no longer than finding it."""
_MOST_REST = 2048
"""The most tokens after a prefix that a decode worker prefills while the workers' rates are unknown."""
_ANSWER_WAIT_S = 0.5
"""The longest wait for a worker's answer, since the prompt can be prefilled instead."""
_MUCH_FULLER = 0.5
"""A worker is not used if its share of pages in use exceeds another worker's by this."""


@dataclass(frozen=True)
class PrefixHit:
    """A decode worker whose prefix cache has a prompt's beginning. `group_prefills`: true if a group
    prefills the rest.
    """

    worker: DecodeWorker
    prefix: Prefix
    group_prefills: bool = False


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of workers. Rates are in tokens per second; 0: unknown.

    Attributes:
        extend: A decode worker's prefill rate after a prefix.
        prefill: A prefill group's measured cost, which predicts its seconds; None: unknown.
        fetch: The rate at which the group's stages fetch a prefix's KV from the decode worker.
        queued_s: Seconds before the group begins this prompt.
    """

    extend: float = 0.0
    prefill: PrefillCost | None = None
    fetch: float = 0.0
    queued_s: float = 0.0


def prompt_key(
    ids: bytes,
    *,
    owner: str,
    salt: str,
    model: str,
    method: MethodSpec,
    profile: Profile | None,
    remembers: bool,
    retain_s: float,
) -> PromptKey:
    """Make the key of a prompt in the prefix cache.

    Args:
        ids: Little-endian uint32.
        owner: The caller's owner id; empty if all callers share the prefix cache.
    """
    tokens = len(ids) // ID_BYTES
    exact_root = root_of(owner, salt, model, "dense")
    root = exact_root
    if not is_exact(method, tokens):
        lengths = lengths_of_thresholds(profile, method, tokens)
        root = root_of(owner, salt, model, method.name, sorted(method.options), lengths)
    chain = chain_of(ids)
    return PromptKey(
        root=root,
        exact_root=exact_root,
        lasting_tokens=lasting_tokens(method, tokens),
        chain=chain,
        tail=ids[len(chain) // LINK_BYTES * PAGE_TOKENS * ID_BYTES :],
        remembers=remembers,
        retain_s=retain_s,
    )


def usable_prefix(found: int, tokens: int) -> int:
    """Return how many of the `found` tokens a prompt of `tokens` tokens can use: full pages before its last
    token, which is always computed; 0 if fewer than _MIN_TOKENS.
    """
    usable = min(found, (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS)
    return usable if usable >= _MIN_TOKENS else 0


def resume_at(found: int, tokens: int, method: MethodSpec) -> int:
    """Return how many of the `found` tokens a group can skip and still compute the same KV as from the
    beginning.
    """
    step = resume_step(method)
    usable = min(usable_prefix(found, tokens), lasting_tokens(method, tokens))
    return usable // step * step if step else 0


def rest_is_long(prefix: int, start: int, tokens: int, rates: Rates) -> bool:
    """Return whether a group would prefill the rest of a prompt sooner than a decode worker. If a rate is
    unknown: whether the rest is longer than the prefix or _MOST_REST.

    Args:
        prefix: Tokens that the decode worker would skip.
        start: Tokens that the group would skip.
    """
    rest = tokens - prefix
    if not (rates.extend and rates.prefill):
        return rest > min(prefix, _MOST_REST)
    return group_seconds(start, tokens, rates) < rest / rates.extend


def group_seconds(start: int, tokens: int, rates: Rates) -> float:
    """Predict the seconds until a group has prefilled a prompt from `start` on.

    The prediction includes fetching the KV before `start`, if the fetch rate is known."""
    fetching = start / rates.fetch if rates.fetch else 0.0
    prefill = 0.0 if rates.prefill is None else rates.prefill.seconds(start, tokens)
    return rates.queued_s + prefill + fetching


def worth_loading(prefix: Prefix, rates: Rates) -> Prefix:
    """Cut a hit's tokens that are on disk, if a group prefills them faster than the disk loads them."""
    near = prefix.tokens - prefix.disk_tokens
    if rates.prefill is None or prefix.disk_s <= rates.prefill.seconds(near, prefix.tokens):
        return prefix
    # A group's state on disk is cut, too, and it is not known whether there is an earlier one.
    group_tokens = prefix.group_tokens if prefix.group_tokens <= near else 0
    return replace(prefix, tokens=near, disk_tokens=0, disk_s=0.0, group_tokens=group_tokens)


def hold_most(found: Mapping[str, int], workers: Sequence[DecodeStats], tokens: int) -> list[str]:
    """Sort the workers with a prefix hit by the hit's length. Leave out workers that are much fuller than
    another. If any worker has room for the whole request, also leave out those that lack pages for the tokens
    after their hit.

    Args:
        found: Worker → tokens of its hit.
        workers: All workers that may serve the prompt.
        tokens: Tokens of the prompt and its answer.
    """
    in_use = {w.name: 1 - w.pages_free / w.pages_total for w in workers if w.pages_total}
    emptiest = min(in_use.values(), default=0.0)
    roomy = any(_fits(w, tokens) for w in workers)

    def serves(worker: DecodeStats) -> bool:
        left = tokens - found[worker.name]
        return in_use.get(worker.name, 1.0) - emptiest <= _MUCH_FULLER and (_fits(worker, left) or not roomy)

    able = [worker for worker in workers if found.get(worker.name) and serves(worker)]
    return [w.name for w in sorted(able, key=lambda w: (-found[w.name], -w.pages_free, w.name))]


def _fits(worker: DecodeStats, tokens: int) -> bool:
    return -(-tokens // worker.page_tokens) <= worker.pages_free


async def find_prefix(
    fleet: Fleet, key: PromptKey, method: MethodSpec, *, tokens: int, answer_tokens: int, tier: ServiceTier
) -> PrefixHit | None:
    """Return the prefix hit to use; None if there is none, or a group prefills the whole prompt sooner.

    Draining workers are left out, because KV made there would be lost.
    """
    if tokens <= _MIN_TOKENS:
        return None
    states = not_draining(tuple(fleet.view.workers.values()))
    asked = await asyncio.gather(*(_ask(fleet, state.name, key) for state in states))
    rates = partial(_rates, fleet, method=method, tokens=tokens, tier=tier)
    answers = [
        hit and replace(hit, prefix=worth_loading(hit.prefix, rates(hit.worker.name))) for hit in asked
    ]
    hits = {hit.worker.name: hit for hit in answers if hit and usable_prefix(hit.prefix.tokens, tokens)}
    found = {name: hit.prefix.tokens for name, hit in hits.items()}
    names = hold_most(found, states, tokens + answer_tokens)
    if not names:
        return None
    best = hits[names[0]]
    return _shared(best, method, tokens, rates(names[0]))


def _shared(hit: PrefixHit, method: MethodSpec, tokens: int, rates: Rates) -> PrefixHit | None:
    """Decide whether the hit's decode worker or a group prefills the rest of a prompt, and cut the hit to the
    tokens that it can use. None: a group prefills the whole prompt sooner."""
    prefix = usable_prefix(hit.prefix.tokens, tokens)
    found = hit.prefix.group_tokens if hit.prefix.has_state else hit.prefix.tokens
    start = resume_at(found, tokens, method)
    start = start if start == found or not hit.prefix.has_state else 0
    if not rest_is_long(prefix, start, tokens, rates):
        return replace(hit, prefix=replace(hit.prefix, tokens=prefix))
    anew = rates.prefill is not None and group_seconds(0, tokens, rates) <= group_seconds(
        start, tokens, rates
    )
    if not start or anew:
        return None
    return replace(hit, prefix=replace(hit.prefix, tokens=start), group_prefills=True)


def _rates(fleet: Fleet, worker: str, method: MethodSpec, tokens: int, tier: ServiceTier) -> Rates:
    groups: Sequence[GroupStats] = not_draining(tuple(fleet.view.groups.values()))
    state = fleet.view.workers.get(worker)
    extend = state.append_tokens_per_second if state is not None else 0.0
    if not groups:
        return Rates(extend=extend)
    first = min(groups, key=lambda g: g.wait_s(tokens, tier))
    return Rates(
        extend=extend,
        prefill=first.cost(method.name),
        fetch=first.fetched_tokens_per_second,
        queued_s=first.wait_s(tokens, tier),
    )


async def _ask(fleet: Fleet, name: str, key: PromptKey) -> PrefixHit | None:
    try:
        worker = fleet.worker(name)
        async with asyncio.timeout(_ANSWER_WAIT_S):
            prefix = await worker.find_prefix(key)
    except (WorkerError, TimeoutError):
        return None
    return None if prefix is None else PrefixHit(worker, prefix)
