"""When a refused request is told to come back, against a pipeline that is played chunk by chunk."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

import pytest

from deltafront.workers.prefill.group import backlog, schedule
from deltafront.workers.prefill.group.schedule import Waiting

AGEING = 256.0
PAGE = 16


@dataclass
class Group:
    """A prefill group as time passes: one chunk after the other enters, and is through `stages` chunk times
    later. A chunk takes its tokens over the rate, give or take a third."""

    rng: random.Random
    chunk: int
    rate: float
    pages: int
    stages: int = 2
    now: float = 0.0
    waiting: dict[str, Waiting] = field(default_factory=dict)
    through: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    opened_at: dict[str, float] = field(default_factory=dict)
    in_flight: list[tuple[float, str, int]] = field(default_factory=list)

    def arrive(self, name: str, tokens: int) -> None:
        self.waiting[name] = schedule.arrival(name, tokens, self.now, -(-tokens // PAGE))
        self.through[name], self.tokens[name] = 0, tokens

    @property
    def unopened(self) -> int:
        return sum(not one.opened for one in self.waiting.values())

    @property
    def free(self) -> int:
        return self.pages - sum(one.pages for one in self.waiting.values() if one.opened)

    def play(self) -> backlog.Play:
        """What is under test, as the controller makes it."""
        entries = [replace(w, remaining=self.tokens[n] - self.through[n]) for n, w in self.waiting.items()]
        return backlog.Play(entries, self.now, AGEING, self.rate, self.free, self.chunk)

    def step(self) -> None:
        """One chunk enters, or one leaves."""
        ready = [one for one in self.waiting.values() if one.remaining]
        chosen = schedule.next_request(ready, self.now, AGEING, self.free)
        if chosen is not None and len(self.in_flight) < self.stages:
            one = self.waiting[chosen]
            if not one.opened:
                self.opened_at[chosen] = self.now
            size = min(self.chunk, one.remaining)
            self.waiting[chosen] = schedule.chunk_sent(one, size, self.now, AGEING)
            seconds = size / self.rate * self.rng.uniform(0.67, 1.33)
            self.in_flight.append((self.now + self.stages * seconds, chosen, size))
            self.now += seconds
        elif self.in_flight:
            self.now = max(self.now, self.in_flight[0][0])
        while self.in_flight and self.in_flight[0][0] <= self.now:
            _, name, size = self.in_flight.pop(0)
            self.through[name] += size
            if not any(other == name for _, other, _ in self.in_flight):
                self.waiting[name] = schedule.became_idle(self.waiting[name], self.now)
            if self.through[name] == self.tokens[name]:
                del self.waiting[name]


def random_group(seed: int) -> Group:
    """In the middle of its work, with up to 24 prompts of any length."""
    rng = random.Random(seed)
    chunk = rng.choice([512, 2048, 16_384])
    group = Group(rng, chunk, rng.choice([250.0, 4000.0, 40_000.0]), pages=131_072 // PAGE)
    for number in range(rng.randint(2, 24)):
        group.arrive(f"r{number}", int(128 * 2 ** rng.uniform(0, 10)))
    for _ in range(rng.randint(1, 40)):
        group.step()
    return group


def right(told: float, true: float, chunk_s: float) -> bool:
    """Within a factor of two, or within the chunk that nothing can interrupt."""
    return abs(told - true) <= chunk_s or true / 2 <= told <= 2 * true


def test_a_place_becomes_free_when_the_backlog_says() -> None:
    """Every place: a queue of n-1 is asked about for each n that wait."""
    verdicts = []
    for seed in range(200):
        group = random_group(seed)
        waiting = {name for name, one in group.waiting.items() if not one.opened}
        told = [group.play().places([128], group.unopened - n)[0] for n in range(len(waiting))]
        began = group.now
        while group.waiting:
            group.step()
        true = sorted(group.opened_at[name] - began for name in waiting)
        verdicts += [right(a, b, group.chunk / group.rate) for a, b in zip(told, true, strict=True)]
    assert len(verdicts) > 1000
    assert sum(verdicts) / len(verdicts) >= 0.9


@pytest.mark.parametrize("chunk", [512, 4096])
@pytest.mark.parametrize("rate", [250.0, 40_000.0])
@pytest.mark.parametrize("longest", [8192, 65_536])
def test_in_a_crowd_each_comes_back_when_there_is_a_place(chunk: int, rate: float, longest: int) -> None:
    """Ten times as many prompts as the queue holds, at once. Those that are refused come back when they are
    told to, and are in within twice that time, not after half of it."""
    rng = random.Random(5)
    group, max_waiting, promises = Group(rng, chunk, rate, pages=131_072 // PAGE), 12, backlog.Promises()
    group.arrive("first", 20_000)
    group.step()
    tokens = {f"{n}": longest if longest == 8192 else int(128 * 2 ** rng.uniform(0, 9)) for n in range(120)}
    keys = {name: number for number, name in enumerate(tokens)}
    due = [(group.now, name) for name in tokens]
    told_first: dict[str, tuple[float, float]] = {}
    verdicts: list[bool] = []
    while due or group.waiting:
        due.sort()
        while due and due[0][0] <= group.now:
            _, name = due.pop(0)
            if group.unopened < max_waiting:
                group.arrive(name, tokens[name])
                promises.kept(keys[name])
                if name in told_first:
                    at, told = told_first[name]
                    verdicts.append(right(told, group.now - at, chunk / rate))
                continue
            seconds = promises.give(group.play(), keys[name], tokens[name], max_waiting, group.now)
            assert seconds is not None
            told_first.setdefault(name, (group.now, seconds))
            due.append((group.now + seconds, name))
        group.step()
        if not group.waiting and due:
            group.now = max(group.now, min(due)[0])
    assert len(verdicts) > 100
    assert sum(verdicts) / len(verdicts) >= 0.8


def test_what_nobody_runs_for_has_no_time() -> None:
    """All pages are held by a request whose chunks are all through but that has not ended."""
    big = schedule.arrival("big", 1024, 0.0, pages=64)
    assert backlog.Play([big], 0.0, AGEING, 100.0, 10, 512).places([128], 1) == []


def test_a_place_is_held_for_who_was_told_to_come_now() -> None:
    """Not for longer than it may be late; and who comes at its time finds its own place."""
    group, promises = Group(random.Random(1), 128, 256.0, pages=256), backlog.Promises()
    for name in "ab":
        group.arrive(name, 256)
    told = [promises.give(group.play(), checksum, 256, 2, 0.0) for checksum in (7, 8, 8)]
    come, last = told[0], told[-1]
    assert come is not None and last is not None and 0.2 < come < last

    def held(checksum: int, until: float, now: float, places: int = 8) -> int:
        return promises.held(checksum, until, now, places)

    assert held(9, come - 0.01, come - 0.2) == 0, "nobody comes so soon"
    assert held(9, come, come - 0.2) == held(7, come, come - 0.2) == 1, "it may be another of that text"
    assert held(9, 100.0, come - 0.2) == 3 and held(9, 100.0, come - 0.2, places=3) == 2
    assert held(7, 100.0, come - 0.05) == 0, "its own time"
    promises.kept(7)
    assert held(9, 100.0, come - 0.05) == 2
    assert held(9, 100.0, 1.1 * last + 0.9) == 1, "a little late, and a tenth of the time told"
    assert held(9, 100.0, 1.1 * last + 1.1) == 0


def test_who_comes_at_its_time_in_vain_keeps_its_turn() -> None:
    """Before those that were told later times, where somebody who was never told comes behind them."""
    group, promises = Group(random.Random(1), 128, 256.0, pages=256), backlog.Promises()
    for name in "abc":
        group.arrive(name, 256)
    first, second = (promises.give(group.play(), checksum, 256, 2, 0.0) for checksum in (7, 8))
    assert first is not None and second is not None and first < second
    again, new = (promises.give(group.play(), checksum, 256, 2, first) for checksum in (7, 9))
    assert again == first, "as if nobody had been told: nothing was read since"
    assert new is not None and new > second, "the other two are before it"
    assert promises.held(10, 100.0, first + 0.1, 8) == 3, "each of them once"


@dataclass
class Client:
    """told: in seconds, at first. early: looks after less than half of that, and never again."""

    checksum: int
    early: bool
    refused_at: float = 0.0
    told: float = 0.0


@pytest.mark.parametrize("rate", [600.0, 1200.0])
def test_in_a_stream_of_ten_times_too_many_the_time_told_is_right(rate: float) -> None:
    """Prompts of 600 tokens for five seconds, at a group with four places. Those that do as they were told
    are in within twice the time; of a quarter that looks after less than half, few are."""
    rng, tokens, places = random.Random(3), 600, 4
    group, promises = Group(rng, 128, rate, pages=256), backlog.Promises()
    crowd = int(10 * rate / tokens * 5.0)
    clients = [Client(number, rng.random() < 0.25) for number in range(crowd)]
    due = [(5.0 * one.checksum / crowd, one.checksum) for one in clients]
    wrong = 0
    while due or group.waiting:
        while due and due[0][0] <= group.now:
            client, now = clients[heapq.heappop(due)[1]], group.now
            unread = sum(group.tokens[name] - group.through[name] for name in group.waiting)
            held = promises.held(client.checksum, now + (unread + tokens) / rate, now, places)
            looks = client.early and client.told > 0
            if group.unopened + held < places:
                promises.kept(client.checksum)
                group.arrive(f"{client.checksum}", tokens)
                wrong += looks
                continue
            told = promises.give(group.play(), client.checksum, tokens, places, now)
            assert told is not None
            if not client.told:
                client.told, client.refused_at = told, now
                heapq.heappush(due, (now + told * (0.45 if client.early else 1.0), client.checksum))
            elif not looks and now + told <= client.refused_at + 2 * client.told + 0.5:
                heapq.heappush(due, (now + told, client.checksum))
            else:
                wrong += not looks
        group.step()
        if not group.waiting and due:
            group.now = max(group.now, due[0][0])
    refused = sum(client.told > 0 for client in clients)
    assert refused > crowd / 2 and wrong <= 0.1 * refused, (wrong, refused)
