"""Requests and faults that follow from a seed alone. Pure functions."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Kinds of processes that may die alone, by a part of their command line: Deltafront's and Ray Serve's.
    Ray's control store is left out, because without Redis the cluster dies with it (docs/deploy.md)."""

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
"""Processes on the way of clients' connections."""
RAYS = (Kind.HAPROXY, Kind.HAPROXY_OWNER, Kind.FALLBACK_PROXY, Kind.SERVE_CONTROLLER)
"""Ray's processes are only killed, because Ray notices a hang late or never."""


class Form(StrEnum):
    """The kind of a client's request, and its end."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    SPARSE = "sparse"
    """With a sparse method."""
    SESSION = "session"
    """Prefill a document, ask two questions and release the session."""
    HTTP = "http"
    """Stream over OpenAI's API. After a broken connection the client sends the request again."""
    CANCEL = "cancel"
    """Another client cancels the request by its id."""
    LEAVE = "leave"
    """The client disconnects."""


COMPARED = (Form.GREEDY, Form.SAMPLED, Form.SPARSE, Form.SESSION, Form.HTTP)
"""Requests whose answers must equal those without faults, token by token."""
OPTIONS: dict[Form, dict[str, Any]] = {
    Form.SAMPLED: {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    Form.SPARSE: {"method": "streaming", "options": {"window": 256, "min_tokens": 0}, "skip_cache": True},
}
"""Options of each kind; the default method is dense. A sparse answer depends on its prefix hit, which may
differ between workers (0023), so only sparse requests without a hit can be compared."""
PROMPTS = 8
"""The number of different prompts. `prompt` says which are long."""
MAX_TOKENS = 48
_LONGEST_PROMPT = 3500
_SHARES = {Form.GREEDY: 4, Form.SAMPLED: 2, Form.SESSION: 2, Form.HTTP: 2, Form.SPARSE: 1}
_SHARES |= {Form.CANCEL: 1, Form.LEAVE: 1}


@dataclass(frozen=True)
class Ask:
    """One client's request. prompt: number of the prompt. tokens: length of the answer. events: events before
    the client cancels or leaves."""

    form: Form
    prompt: int
    tokens: int
    events: int


@dataclass(frozen=True)
class Fault:
    """A signal for one process. which: index among the processes of its kind, modulo their number. progress:
    the share of the episode's events before the signal."""

    kind: Kind
    which: int
    signal: signal.Signals
    progress: float


@dataclass(frozen=True)
class Episode:
    """Concurrent requests and the faults during them. At least one door survives."""

    seed: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def episode(seed: int, requests: int, stops: bool = True, others: int = 2) -> Episode:
    """Draw an episode with at least one fault: at most one of a door, and of other processes at most
    `door.replays`. stops: whether processes may also be stopped."""
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
    """Return a prompt, always the same text for a number. Every second one is long."""
    draw = random.Random(number)
    length = draw.randint(_LONGEST_PROMPT // 2, _LONGEST_PROMPT) if number % 2 else draw.randint(40, 400)
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz     .,") for _ in range(length))


def question(number: int) -> str:
    """Return the question about a document."""
    return f"\nWhat is number {number}?"
