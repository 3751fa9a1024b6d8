"""The slots of a decode worker's states, for models with linear attention or rolling buffers.

Pages hold the KV of every token. A slot holds the state of all layers that have one, after one token. A
request changes its own state with every token, and copies of it stay at page boundaries, where a later prompt
can continue. These copies have the names of the cached blocks that end there. Only the event loop's thread
uses this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.workers.messages.prompts import boundary_before

SCRATCH = 0
"""The slot of padding rows. No request gets it."""


class OutOfSlots(Exception):
    """Too few slots are free. None has been taken."""


class StateSlots:
    """Slots with reference counts. A slot without references counts as free, even if its state is cached.

    The least recently used cached state is evicted first.

    Attributes:
        evicted: Number of states evicted so far.
        below: The slots in host memory, which keep copies of cached states; None: there are none.
        on_cached: Called with the name of each newly cached state.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a decode worker needs state slots, got {slots}")
        self.total, self.evicted = slots, 0
        self.below: StateSlots | None = None
        self.on_cached: Callable[[bytes], None] = lambda _name: None
        self._free = list(range(slots, SCRATCH, -1))
        self._references = [0] * (slots + 1)
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        """The slot of each cached state, by its block's name, least recently used first."""
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free) + sum(not self._references[slot] for slot in self._names)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` slots, each with one reference. Raises OutOfSlots."""
        if count > self.free:
            raise OutOfSlots(f"{count} state slots are needed but only {self.free} are free")
        while len(self._free) < count:
            self._evict()
        taken = tuple(self._free.pop() for _ in range(count))
        for slot in taken:
            self._references[slot] = 1
        return taken

    def _evict(self) -> None:
        name = next(name for name, slot in self._cached.items() if not self._references[slot])
        self._free.append(self._drop(name))
        self.evicted += 1

    def _drop(self, name: bytes) -> int:
        slot = self._cached.pop(name)
        del self._names[slot]
        return slot

    def incref(self, slot: int) -> None:
        self._references[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Drop one reference to each slot. Raises ValueError if one has none."""
        for slot in slots:
            if not self._references[slot]:
                raise ValueError(f"state slot {slot} is released but has no holder")
            self._references[slot] -= 1
            if not self._references[slot] and slot not in self._names:
                self._free.append(slot)

    def cache(self, name: bytes, slot: int) -> None:
        """Cache the state in a slot that somebody holds. Nobody may change it afterwards. A name that is
        cached already keeps its slot."""
        if name in self._cached:
            self._cached.move_to_end(name)
        elif slot not in self._names:
            self._cached[name], self._names[slot] = slot, name
            self.on_cached(name)

    def find(self, name: bytes) -> int | None:
        """Return the slot of a cached state, which is then the most recently used, also below; None if there
        is none here."""
        if self.below is not None:
            self.below.find(name)
        slot = self._cached.get(name)
        if slot is not None:
            self._cached.move_to_end(name)
        return slot

    def __contains__(self, name: bytes) -> bool:
        """Return whether a state is cached here or below."""
        return name in self._cached or (self.below is not None and name in self.below)

    def name(self, slot: int) -> bytes | None:
        """Return the name of the cached state in a slot: the object that `cache` got. None: there is none."""
        return self._names.get(slot)

    def drop(self, names: Iterable[bytes]) -> None:
        """Remove states from the cache and those below, so that no prompt finds them."""
        for name in names:
            if self.below is not None:
                self.below.drop([name])
            if name in self._cached:
                slot = self._drop(name)
                if not self._references[slot]:
                    self._free.append(slot)

    def clear(self) -> None:
        self.drop(list(self._cached))


class RequestStates:
    """The slots of one request.

    Args:
        source: The slot of the session's or cached prefix's state, from which the request continues; None: it
            starts at its first token.
        held_tokens: The tokens before that state.
        kept_tokens: The tokens of the session that the request makes, if it goes on after them; 0: none.

    Attributes:
        live: The slot of the state after the request's last token. Each step changes it.
        boundary: The slot of the state after `boundary_tokens` tokens, the last full page.
        kept: The slot of the session's state; None if the request makes none.
    """

    def __init__(self, slots: StateSlots, source: int | None, held_tokens: int, kept_tokens: int = 0) -> None:
        if kept_tokens and kept_tokens < held_tokens:
            raise ValueError(f"the state after {kept_tokens} of {held_tokens} held tokens is not known")
        self._slots, self.source, self._held_tokens = slots, source, held_tokens
        self.kept_tokens = kept_tokens
        ends_there = source is not None and kept_tokens == held_tokens
        holds = () if source is None else (source,) * (1 + ends_there)
        for slot in holds:
            slots.incref(slot)  # first, since `take` may evict it
        try:
            taken = slots.take(2 + (kept_tokens > 0 and not ends_there))
        except OutOfSlots:
            slots.release(holds)
            raise
        self.live, self.boundary = taken[:2]
        self.kept = source if ends_there else taken[2] if kept_tokens else None
        self.boundary_tokens = 0
        """0: the slot holds no state yet."""
        self._spaced: dict[int, int] = {}
        """Slots of further states of the prompt, which are only to be cached, by number of tokens."""
        self._arrived: set[int] = set()
        self._begun_at = held_tokens
        self._cached: list[bytes] = []

    def first(self, start: int) -> int | None:
        """Return the slot of the state before token `start`, with which the decode worker's prefill begins;
        None: there are no tokens before it."""
        if start != self._held_tokens:
            return self.live
        return self.source

    def keep(self, tokens: int) -> None:
        """Take a slot for a session of the first `tokens` tokens, if there is none. Raises OutOfSlots."""
        if self.kept is None:
            (self.kept,) = self._slots.take(1)
        self.kept_tokens = tokens

    def cuts(self, start: int, end: int) -> Mapping[int, tuple[int, ...]]:
        """Return the slots for the states after tokens start+1 .. end, by number of tokens. Records that the
        boundary's state will be written."""
        places: dict[int, tuple[int, ...]] = {}
        if boundary_before(end) > start:
            self.boundary_tokens = boundary_before(end)
            places[self.boundary_tokens] = (self.boundary,)
        if self.kept is not None and start < self.kept_tokens <= end:
            places[self.kept_tokens] = (*places.get(self.kept_tokens, ()), self.kept)
        places[end] = (*places.get(end, ()), self.live)
        return dict(sorted(places.items()))

    def arriving(self, tokens: int, prompt_tokens: int) -> tuple[int, ...]:
        """Return the slots for a state that a prefill stage sends: the state after `tokens` tokens. If it is
        only to be cached and no slot is free: none."""
        if tokens in self._spaced:
            return (self._spaced[tokens],)
        slots: tuple[int, ...] = ()
        if tokens == boundary_before(prompt_tokens):
            self.boundary_tokens, slots = tokens, (self.boundary,)
        if tokens == self.kept_tokens and self.kept is not None:
            slots += (self.kept,)
        if tokens == prompt_tokens:
            slots += (self.live,)
        if not slots and self._slots.free:
            slots = self._slots.take(1)
            self._spaced[tokens] = slots[0]
        return slots

    def arrived(self, tokens: int) -> None:
        """Record that the state after `tokens` tokens has been written in every layer."""
        self._arrived.add(tokens)

    def resume(self, points: Iterable[int]) -> list[int]:
        """Return those of `points` (numbers of tokens) whose state is there for another attempt."""
        return [tokens for tokens in points if tokens in self._arrived and tokens in self._spaced]

    def begin_at(self, tokens: int) -> None:
        """Record where the next attempt begins: at the held tokens, or at a point from `resume`."""
        self._begun_at = tokens
        self._arrived = {place for place in self._arrived if place <= tokens}

    @property
    def start(self) -> tuple[int, int | None]:
        """Return the tokens after which a prefill group begins, and the slot of the state there; None: there
        are no tokens before."""
        if self._begun_at == self._held_tokens:
            return self._begun_at, self.source
        return self._begun_at, self._spaced[self._begun_at]

    def step(self, length: int) -> bool:
        """Record a decode step that computes token number `length` (from 1). Returns whether the state after
        it is copied to the boundary's slot."""
        if length % PAGE_TOKENS:
            return False
        self.boundary_tokens = length
        return True

    def cache(self, name: Callable[[int], bytes | None], *, ends: bool) -> None:
        """Cache the states at page boundaries.

        Args:
            name: Returns the name of the cached block that ends after this many tokens; None: no such block.
            ends: True if the request ends here, and needs no slot for another boundary.
        """
        for tokens in sorted(self._spaced.keys() & self._arrived):
            if (block := name(tokens)) is not None:
                self._cache(block, self._spaced.pop(tokens))
        if (block := name(self.boundary_tokens)) is not None:
            self._cache(block, self.boundary)
            self.boundary_tokens = 0
            # A slot is free, since this one just became free.
            self.boundary = SCRATCH if ends else self._slots.take(1)[0]

    def _cache(self, name: bytes, slot: int) -> None:
        self._slots.cache(name, slot)
        self._cached.append(name)
        self._slots.release([slot])

    def forget(self) -> None:
        """Remove the states that this request has cached from the cache."""
        self._slots.drop(self._cached)

    def held(self) -> Iterator[int]:
        yield from (self.live, *self._spaced.values())
        yield from (slot for slot in (self.source, self.kept, self.boundary) if slot)

    def free(self) -> None:
        """Release every slot, once. Nothing may use the states afterwards."""
        self._slots.release(list(self.held()))
