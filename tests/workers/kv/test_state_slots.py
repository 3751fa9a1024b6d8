"""Compares the slots of states with a model of sets, and plans where states of a prompt are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.workers.kv.pages.host_states import HostStates
from deltafront.workers.kv.pages.state_slots import SCRATCH, OutOfSlots, RequestStates, StateSlots
from deltafront.workers.messages.prompts import boundary_before, state_places

from .loops import settle


@pytest.mark.parametrize(
    ("tokens", "boundary"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (131_072, 131_056)]
)
def test_boundary_leaves_the_last_token_to_compute(tokens: int, boundary: int) -> None:
    assert boundary_before(tokens) == boundary


@pytest.mark.parametrize(
    ("tokens", "kept", "places"),
    [
        (10, 0, (10,)),
        (40, 0, (32, 40)),
        (200, 0, (64, 128, 192, 200)),
        (200, 199, (64, 128, 192, 199, 200)),
        (192, 64, (64, 128, 176, 192)),
    ],
)
def test_states_stay_at_every_spacing_and_at_the_ends(
    tokens: int, kept: int, places: tuple[int, ...]
) -> None:
    assert state_places(tokens, kept, 64) == places


def test_evicts_the_least_recently_used_cached_state() -> None:
    slots = StateSlots(3)
    taken = slots.take(3)
    for name, slot in zip((b"a", b"b", b"c"), taken, strict=True):
        slots.cache(name, slot)
    with pytest.raises(OutOfSlots, match="1 state slots are needed but only 0 are free"):
        slots.take(1)
    slots.release(taken)
    assert slots.find(b"a") == taken[0], "now b is the oldest"
    assert slots.take(1) == (taken[1],)
    assert (slots.find(b"b"), slots.find(b"c")) == (None, taken[2])
    assert slots.free == 2


def test_state_of_a_dropped_name_stays_while_somebody_holds_it() -> None:
    slots = StateSlots(1)
    (slot,) = slots.take(1)
    slots.cache(b"a", slot)
    slots.drop([b"a", b"unknown"])
    assert (slots.find(b"a"), slots.free) == (None, 0)
    slots.release([slot])
    assert slots.free == 1
    with pytest.raises(ValueError, match="has no holder"):
        slots.release([slot])


@given(st.lists(st.tuples(st.sampled_from("take release cache drop find".split()), st.integers(0, 5))))
def test_every_slot_is_free_held_or_cached(steps: list[tuple[str, int]]) -> None:
    slots, held, cached = StateSlots(4), list[int](), dict[bytes, int]()
    for step, number in steps:
        name = bytes([number])
        if step == "take":
            try:
                (slot,) = slots.take(1)
            except OutOfSlots:
                assert len(held) == 4
                continue
            assert slot != SCRATCH and slot not in held
            held.append(slot)
            cached = {key: where for key, where in cached.items() if where != slot}
        elif step == "release" and held:
            slots.release([held.pop(number % len(held))])
        elif step == "cache" and held:
            slot = held[number % len(held)]
            slots.cache(name, slot)
            if name not in cached and slot not in cached.values():
                cached[name] = slot
        elif step == "drop":
            slots.drop([name])
            cached.pop(name, None)
        assert slots.free == 4 - len(held)
        assert {key: slots.find(key) for key in cached} == cached
    slots.release(held)
    assert (slots.free, len(slots.take(4))) == (4, 4)


def test_request_caches_its_boundary_and_goes_on_in_another_slot() -> None:
    slots = StateSlots(3)
    states = RequestStates(slots, None, 0)
    assert states.cuts(0, 40) == {32: (states.boundary,), 40: (states.live,)}
    before = states.boundary
    states.cache({16: b"one", 32: b"two"}.get, ends=False)
    assert slots.find(b"two") == before != states.boundary
    assert [states.step(tokens) for tokens in (41, 47, 48)] == [False, False, True]
    states.cache({48: b"three"}.get, ends=True)
    assert (b"two" in slots, b"three" in slots) == (True, True), "three slots suffice"
    states.free()
    assert slots.free == 3


def test_request_does_not_cache_a_boundary_after_its_tokens() -> None:
    """A step that was launched ahead has passed a boundary, and the answer ended before it."""
    slots = StateSlots(2)
    states = RequestStates(slots, None, 0)
    states.cuts(0, 31)
    assert states.step(32)
    states.cache({16: b"one"}.get, ends=True)
    assert b"one" not in slots
    states.free()
    assert slots.free == 2


def test_request_keeps_a_session_within_or_at_its_prefix() -> None:
    slots = StateSlots(6)
    (source,) = slots.take(1)
    states = RequestStates(slots, source, 32, kept_tokens=32)
    assert states.kept == source and states.first(32) == source
    assert states.cuts(32, 50) == {48: (states.boundary,), 50: (states.live,)}
    states.free()
    longer = RequestStates(slots, source, 32, kept_tokens=50)
    assert longer.cuts(32, 50) == {48: (longer.boundary,), 50: (longer.kept, longer.live)}
    longer.free()
    with pytest.raises(ValueError, match="the state after 20 of 32 held tokens"):
        RequestStates(slots, source, 32, kept_tokens=20)
    assert slots.free == 5


def test_request_does_not_evict_the_state_that_it_continues() -> None:
    slots = StateSlots(3)
    taken = slots.take(3)
    slots.cache(b"old", taken[0])
    slots.cache(b"source", taken[1])
    slots.release(taken[1:])
    with pytest.raises(OutOfSlots, match="2 state slots are needed but only 1 are free"):
        RequestStates(slots, taken[1], 32)
    assert (slots.find(b"source"), slots.free) == (taken[1], 2)
    slots.release(taken[:1])
    states = RequestStates(slots, taken[1], 32)
    assert taken[1] not in (states.live, states.boundary) and b"old" not in slots
    states.free()
    assert slots.free == 3


def test_prompt_state_that_finds_no_slot_is_left_out() -> None:
    slots = StateSlots(3)
    states = RequestStates(slots, None, 0)
    (spaced,) = states.arriving(64, 200)
    assert states.arriving(64, 200) == (spaced,), "another stage sends its layers"
    assert states.arriving(128, 200) == ()
    states.cache({64: b"a"}.get, ends=False)
    assert b"a" not in slots, "not all stages have sent it"
    states.arrived(64)
    states.cache({64: b"a"}.get, ends=False)
    assert slots.find(b"a") == spaced
    states.free()
    assert slots.free == 3


class Host:
    """Slots on a GPU and in host memory. A dict has the letter in each."""

    def __init__(self, slots: int, kept: int) -> None:
        self.gpu = StateSlots(slots)
        self.host = HostStates(self.gpu, kept, self.move)
        self.on_gpu, self.on_host = dict[int, str](), dict[int, str]()
        self.meanwhile: Callable[[], None] = lambda: None

    async def move(self, slot: int, kept: int, back: bool) -> None:
        self.meanwhile()
        await asyncio.sleep(0)
        if back:
            self.on_gpu[slot] = self.on_host[kept]
        else:
            self.on_host[kept] = self.on_gpu[slot]

    def cache(self, letter: str) -> None:
        (slot,) = self.gpu.take(1)
        self.on_gpu[slot] = letter
        self.gpu.cache(letter.encode() * 3, slot)
        self.gpu.release([slot])

    async def settle(self) -> None:
        await settle(self.host)

    def check(self) -> None:
        """Every state that can be found is the right one."""
        for slots, letters in ((self.gpu, self.on_gpu), (self.host.slots, self.on_host)):
            for slot in range(1, slots.total + 1):
                if (name := slots.name(slot)) is not None:
                    assert letters[slot].encode() * 3 == name


@given(st.text("abcdefgh", max_size=30), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=60)
def test_host_memory_keeps_what_the_gpu_evicts(cached: str, slots: int, kept: int, at_once: int) -> None:
    async def run() -> None:
        both = Host(slots, kept)
        for at in range(0, len(cached), at_once):
            for letter in cached[at : at + at_once]:
                both.cache(letter)
            await both.settle()
            both.check()
        if at_once == 1:
            last = list(dict.fromkeys(reversed(cached)))[: max(slots, kept)]
            assert all(letter.encode() * 3 in both.gpu for letter in last), "the most recently used"

    asyncio.run(run())


async def test_a_slot_that_changes_during_its_copy_is_not_kept() -> None:
    both = Host(1, 2)
    both.cache("a")

    def evict() -> None:
        both.meanwhile = lambda: None
        both.cache("b")

    both.meanwhile = evict
    await both.settle()
    assert (b"aaa" in both.gpu, b"bbb" in both.gpu) == (False, True)
    both.check()


async def test_dropped_states_leave_host_memory_too() -> None:
    both = Host(2, 2)
    both.cache("a")
    await both.settle()
    assert b"aaa" in both.host.slots
    both.gpu.drop([b"aaa"])
    assert b"aaa" not in both.gpu and b"aaa" not in both.host.slots
    assert (both.gpu.free, both.host.slots.free) == (2, 2)


async def test_use_on_the_gpu_counts_in_host_memory() -> None:
    both = Host(3, 2)
    for letter in "ab":
        both.cache(letter)
        await both.settle()
    assert both.gpu.find(b"aaa") is not None
    both.cache("c")
    await both.settle()
    assert b"aaa" in both.host.slots and b"bbb" not in both.host.slots
