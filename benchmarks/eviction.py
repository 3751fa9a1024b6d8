"""Simulates the prefix cache's hit rate (the share of prompt tokens found) for several eviction policies.

    python -m deltafront.benchmarks.eviction

`least recent` (LRU) evicts from the least recently used conversation, `known` from the conversation whose
next use is the latest (Belady's order, which knows the future). Both evict a conversation's last pages first.
`learned` is the service's `PagePool`. Traces are synthetic, and requests take no time: agents' sessions grow
from turn to turn, and together they need more pages than the cache has; chats with a common system prompt end
after some turns. Prints a table and writes benchmarks/results/eviction.json.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.markdown import markdown
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, PagePool
from deltafront.workers.kv.pages.prefix_cache import PrefixCache
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "eviction.json"
PAGES = 327_680 // PAGE_TOKENS
SYSTEM = 1024 // PAGE_TOKENS
SEEDS = 3


@dataclass(frozen=True)
class Turn:
    """One request of a conversation, at time `at` in seconds. Its prompt is a system prompt of `system`
    pages, followed by `pages` pages of the conversation."""

    at: float
    conversation: str
    pages: int
    system: int = 0


Trace = list[Turn]


def turns(chance: random.Random, name: str, starts: float, sizes: Sequence[int], pause: float, spread: float,
          system: int = 0) -> Iterator[Turn]:  # fmt: skip
    """Yield the turns of the conversation `name`. `sizes` are their prompt lengths in pages, without system
    prompt. Pauses between turns are random, with a mean of `pause` seconds."""
    for size in sizes:
        yield Turn(starts, name, size, system)
        starts += pause * chance.lognormvariate(-spread * spread / 2, spread)


def sessions(chance: random.Random, count: int, spread: float = 0.5, page: int = PAGE_TOKENS) -> Trace:
    """Make a trace of `count` agents' sessions of 30 turns. A session's prompts have 16,000 to 84,000 tokens
    at first and grow towards 42,000 to 105,000, unless the first is longer.

    Args:
        spread: Standard deviation of the logarithm of pauses between turns; 0: a session's pauses are equal.
        page: Tokens of a page.
    """
    trace: Trace = []
    rounds = 30
    for n in range(count):
        first, last = chance.randint(16_000, 84_000), chance.randint(42_000, 105_000)
        grown = max(first, last)
        sizes = [(first + (grown - first) * k // rounds) // page for k in range(rounds)]
        pause = chance.uniform(15.0, 60.0)
        trace += turns(chance, f"session {n}", chance.uniform(0.0, pause), sizes, pause, spread)
    return sorted(trace, key=lambda turn: turn.at)


def chats(chance: random.Random, rate: float, seconds: float = 900.0) -> Trace:
    """Make a trace of short chats with a common system prompt. `rate` chats begin per second, for `seconds`
    seconds; each ends after 1 to 20 turns."""
    trace: Trace = []
    starts = 0.0
    while (starts := starts + chance.expovariate(rate)) < seconds:
        number = 1 + min(19, int(chance.expovariate(1 / 4)))
        sizes = [chance.randint(200, 2_000) // PAGE_TOKENS]
        while len(sizes) < number:
            sizes.append(sizes[-1] + chance.randint(300, 1_500) // PAGE_TOKENS)
        name = f"chat {len(trace)}"
        trace += turns(chance, name, starts, sizes, chance.uniform(10.0, 40.0), 0.8, SYSTEM)
    return sorted(trace, key=lambda turn: turn.at)


def mixed(chance: random.Random, count: int, rate: float) -> Trace:
    return sorted([*sessions(chance, count), *chats(chance, rate)], key=lambda turn: turn.at)


def segments(turn: Turn) -> list[tuple[str, int]]:
    return [*([("system", turn.system)] if turn.system else []), (turn.conversation, turn.pages)]


class Uses:
    """Looks up when each conversation of a trace, or the system prompt, was last used and is used next."""

    def __init__(self, trace: Trace) -> None:
        self._at: dict[str, list[float]] = {}
        for turn in trace:
            for name, _pages in segments(turn):
                self._at.setdefault(name, []).append(turn.at)

    def since_last(self, name: str, now: float) -> float:
        return now - self._at[name][bisect_left(self._at[name], now) - 1]

    def until_next(self, name: str, now: float) -> float:
        after = bisect_right(self._at[name], now)
        return self._at[name][after] - now if after < len(self._at[name]) else math.inf


def found_in_order(trace: Trace, pages: int, key: Callable[[str, float], float]) -> list[int]:
    """Return how many pages of its prompt each turn finds in the cache. When `pages` are not enough, the
    conversation with the largest `key` loses its last pages first."""
    held: dict[str, int] = {}
    found: list[int] = []
    for turn in trace:
        used = dict(segments(turn))
        here = [min(size, held.get(name, 0)) for name, size in used.items()]
        found.append(here[0] if here[0] < segments(turn)[0][1] else sum(here))
        others = {name: size for name, size in held.items() if name not in used and size}
        excess = sum(used.values()) + sum(others.values()) - pages
        for name in sorted(others, key=lambda name: (-key(name, turn.at), name == "system")):
            gone = max(0, min(excess, others[name]))
            excess, others[name] = excess - gone, others[name] - gone
        held = others | used
    return found


def learned(trace: Trace, pages: int) -> list[int]:
    """Return how many pages each turn finds in the service's prefix cache."""
    now = 0.0
    pool = PagePool(pages, prefix_cache=PrefixCache(lambda: now))
    found: list[int] = []
    for turn in trace:
        now, chain = turn.at, chain_of(turn)
        key = PromptKey(root=b"", exact_root=b"", lasting_tokens=0, chain=chain)
        here, _exact = pool.prefix_cache.find(key)
        pool.incref(here)
        table = here + pool.allocate(len(chain) // LINK_BYTES - len(here))
        pool.prefix_cache.add(b"", chain, table, 0.0, len(here))
        pool.release(table)
        found.append(len(here))
    return found


@functools.cache
def links(name: str) -> bytes:
    """Return made-up prefix-cache hashes (links) of a conversation's pages, enough for its longest prompt."""
    return hashlib.shake_128(name.encode()).digest(110_000 // PAGE_TOKENS * LINK_BYTES)


def chain_of(turn: Turn) -> bytes:
    return b"".join(links(name)[: size * LINK_BYTES] for name, size in segments(turn))


def share(trace: Trace, found: Sequence[int], kind: str) -> float:
    """Return the hit rate of conversations whose name begins with `kind`."""
    own = [(hit, turn) for hit, turn in zip(found, trace, strict=True) if turn.conversation.startswith(kind)]
    return sum(hit for hit, _ in own) / sum(turn.system + turn.pages for _, turn in own)


LOADS: dict[str, tuple[str, Callable[[random.Random], Trace]]] = {
    "6 sessions": ("session", lambda chance: sessions(chance, 6)),
    "8 sessions": ("session", lambda chance: sessions(chance, 8)),
    "16 sessions": ("session", lambda chance: sessions(chance, 16)),
    "16 sessions, regular": ("session", lambda chance: sessions(chance, 16, 0.1)),
    "chats, 2 a second": ("chat", lambda chance: chats(chance, 2.0)),
    "chats, 4 a second": ("chat", lambda chance: chats(chance, 4.0)),
    "8 sessions (and chats)": ("session", lambda chance: mixed(chance, 8, 1.0)),
    "chats (and 8 sessions)": ("chat", lambda chance: mixed(chance, 8, 1.0)),
}


def measure(name: str, seeds: int) -> dict[str, object]:
    kind, make = LOADS[name]
    shares: dict[str, list[float]] = {"least recent": [], "learned": [], "known": []}
    for seed in range(seeds):
        trace = make(random.Random(seed))
        uses = Uses(trace)
        for order, found in (
            ("least recent", found_in_order(trace, PAGES, uses.since_last)),
            ("learned", learned(trace, PAGES)),
            ("known", found_in_order(trace, PAGES, uses.until_next)),
        ):
            shares[order].append(share(trace, found, kind))
    return {"load": name, **{order: round(statistics.fmean(all), 3) for order, all in shares.items()}}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="traces of each load")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = [measure(name, given.seeds) for name in LOADS]
    orders = list(rows[0])
    print(markdown(orders, [[row[order] for order in orders] for row in rows]))
    write_json(given.output, {"pages": PAGES, "commit": commit_of(ROOT), "rows": rows})


if __name__ == "__main__":
    main()
