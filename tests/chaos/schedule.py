"""What is asked and what dies, from a seed alone. Pure."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """A process that may die alone, as a part of its command line: Deltafront's own, and Ray Serve's. Ray's
    control store is not among them: the cluster dies with it, unless it has Redis (docs/deploy.md)."""

    STAGE = "ray::StageActor"
    CONTROLLER = "ray::ControllerActor"
    DECODE = "ray::DecodeActor"
    RANK = "ray::RankActor"
    GROUP_OWNER = "ray::ServeReplica:deltafront:PrefillGroup"
    DECODE_OWNER = "ray::ServeReplica:deltafront:DecodeReplica"
    DOOR = "ray::ServeReplica:deltafront:FrontDoor"
    HAPROXY = "bin/haproxy -"
    HAPROXY_OWNER = "ray::HAProxyManager"
    FALLBACK_PROXY = "ray::ProxyActor"
    SERVE_CONTROLLER = "ray::ServeController"


ENTRIES = (Kind.DOOR, Kind.HAPROXY, Kind.HAPROXY_OWNER, Kind.FALLBACK_PROXY)
"""Those that clients' connections end in or may be led through."""
RAYS = (Kind.HAPROXY, Kind.HAPROXY_OWNER, Kind.FALLBACK_PROXY, Kind.SERVE_CONTROLLER)
"""These only die: that one of them hangs Ray notices late, or never."""


class Form(StrEnum):
    """How a client asks, and how it ends."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    SPARSE = "sparse"
    """By a method that reads long prompts sparsely."""
    SESSION = "session"
    """Reads a document, asks about it twice, and releases it."""
    HTTP = "http"
    """Streams over OpenAI's API; whoever uses it sends a request whose connection broke again."""
    CANCEL = "cancel"
    """Cancelled by its id, by another client."""
    LEAVE = "leave"
    """The client goes away."""


COMPARED = (Form.GREEDY, Form.SAMPLED, Form.SPARSE, Form.SESSION, Form.HTTP)
"""Answers that must be those of a service without faults, token by token."""
OPTIONS: dict[Form, dict[str, Any]] = {
    Form.SAMPLED: {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    Form.SPARSE: {"method": "streaming", "options": {"window": 256, "min_tokens": 0}, "skip_cache": True},
}
"""Beside the prompt; by default the method is dense. A sparse answer depends on the K/V that it finds, and
another worker may have other K/V or none (0023): only one that finds nothing can be compared."""
PROMPTS = 8
"""Different ones; `prompt` says which are long."""
MAX_TOKENS = 48
_LONGEST_PROMPT = 3500
_SHARES = {Form.GREEDY: 4, Form.SAMPLED: 2, Form.SESSION: 2, Form.HTTP: 2, Form.SPARSE: 1}
_SHARES |= {Form.CANCEL: 1, Form.LEAVE: 1}


@dataclass(frozen=True)
class Ask:
    """One client's request. prompt: which. tokens: of the answer. events: seen before a client cancels or
    leaves."""

    form: Form
    prompt: int
    tokens: int
    events: int


@dataclass(frozen=True)
class Fault:
    """A signal for one process. which: of those of its kind, counted round. progress: of all events that the
    episode's clients are going to see, the share that comes before it."""

    kind: Kind
    which: int
    signal: signal.Signals
    progress: float


@dataclass(frozen=True)
class Episode:
    """Requests that run side by side, and what happens under them. Never do all doors die."""

    seed: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def episode(seed: int, requests: int, stops: bool = True, others: int = 2) -> Episode:
    """One fault at least: one door's at most, and of other processes at most as often as a request is tried
    again (`door.replays`). stops: whether a process may hang instead of dying."""
    draw = random.Random(seed)
    asks = [_ask(draw) for _ in range(requests)]
    faults: list[Fault] = []
    for _ in range(draw.randint(1, others + 1)):
        fault = _fault(draw, stops)
        doors = [one.kind is Kind.DOOR for one in (*faults, fault)]
        if sum(doors) <= 1 and len(doors) - sum(doors) <= others:
            faults.append(fault)
    return Episode(seed, tuple(asks), tuple(sorted(faults, key=lambda fault: fault.progress)))


def _ask(draw: random.Random) -> Ask:
    form = draw.choices(list(_SHARES), list(_SHARES.values()))[0]
    return Ask(form, draw.randrange(PROMPTS), draw.randint(8, MAX_TOKENS), draw.randint(0, 30))


def _fault(draw: random.Random, stops: bool) -> Fault:
    kind = draw.choice(list(Kind))
    hangs = stops and draw.random() < 0.2 and kind not in RAYS
    sign = signal.SIGSTOP if hangs else signal.SIGKILL
    return Fault(kind, draw.randrange(1 << 16), sign, draw.uniform(0.02, 0.9))


def prompt(number: int) -> str:
    """The same text always: every second one is long."""
    draw = random.Random(number)
    length = draw.randint(_LONGEST_PROMPT // 2, _LONGEST_PROMPT) if number % 2 else draw.randint(40, 400)
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz     .,") for _ in range(length))


def question(number: int) -> str:
    """About a document."""
    return f"\nWhat is number {number}?"
