"""A stand-in for NIXL: agents of one process that read from one another's memory by address. Like NIXL, they
check that memory is registered and peers are known, and fail if a peer is gone."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deltafront.workers.kv.handoff.nixl_agent import Agent

NIXL = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not NIXL, reason="needs the package nixl")


class Disconnected(Exception):
    """NIXL's exception of this name. Its only base class is Exception."""


class Fabric:
    """Connects agents.

    Attributes:
        stalled: Agents from which reads do not end.
        dead: Agents whose processes have ended.
        on_begin: Called with the number of each transfer before it is posted.
    """

    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.stalled: set[str] = set()
        self.dead: set[str] = set()
        self.begun = 0
        self.under_way = 0
        self.on_begin: Callable[[int], None] = lambda _number: None
        self._numbers = itertools.count()

    def agent(self) -> Agent:
        agent = FakeAgent(self, f"agent-{next(self._numbers)}")
        self.agents[agent.name] = agent
        return agent


class FakeTransfer:
    def __init__(self, remote: str, reads: list[tuple[int, int, int]]) -> None:
        self.remote, self.reads, self.state = remote, reads, "NEW"


class FakeAgent:
    """An agent whose data moves when a transfer is found to be done. Only the thread of its first transfer
    may use it."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.name, self.fabric = name, fabric
        self.registered: list[tuple[int, int, int, str]] = []
        self.known: dict[str, list[tuple[int, int, int, str]]] = {}
        self.broken: set[str] = set()
        self.connections = 0
        self._thread: int | None = None

    def register_memory(self, reg_list: Any, mem_type: str) -> None:
        self.registered += [(*span[:3], mem_type) for span in reg_list]

    def get_agent_metadata(self) -> bytes:
        return pickle.dumps((self.name, self.registered))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, registered = pickle.loads(metadata)
        if name in self.fabric.dead:
            raise Disconnected("NIXL_ERR_REMOTE_DISCONNECT")
        self.known[name] = registered
        self.connections += 1
        return bytes(name, "ascii")

    def check_remote_metadata(self, agent: str) -> bool:
        return agent in self.known

    def remove_remote_agent(self, agent: str) -> None:
        del self.known[agent]
        self.broken.discard(agent)

    def get_xfer_descs(self, descs: Any, mem_type: str) -> list[tuple[int, int, int, str]]:
        assert descs.dtype == "uint64" and descs.shape[1] == 3
        return [(*map(int, row), mem_type) for row in descs]

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str
    ) -> FakeTransfer:
        assert operation == "READ" and len(local_descs) == len(remote_descs)
        assert self._thread in (None, threading.get_ident()), "an agent is not safe to use from two threads"
        self._thread = threading.get_ident()
        for side, registered in ((local_descs, self.registered), (remote_descs, self.known[remote_agent])):
            for one in side:
                if not any(_covers(span, one) for span in registered):
                    raise KeyError(f"NIXL_ERR_NOT_FOUND: {one}")
        pairs = zip(remote_descs, local_descs, strict=True)
        assert all(there[1] == here[1] for there, here in zip(remote_descs, local_descs, strict=True))
        return FakeTransfer(remote_agent, [(there[0], here[0], here[1]) for there, here in pairs])

    def transfer(self, handle: FakeTransfer) -> str:
        self.fabric.on_begin(self.fabric.begun)
        self.fabric.begun += 1
        self.fabric.under_way += 1
        handle.state = "PROC"
        return handle.state

    def check_xfer_state(self, handle: FakeTransfer) -> str:
        if handle.remote in self.fabric.dead | self.broken:
            self.broken.add(handle.remote)
            self._over(handle, "ERR")
            raise Disconnected("NIXL_ERR_REMOTE_DISCONNECT")
        if handle.state == "PROC" and handle.remote not in self.fabric.stalled:
            for source, target, size in handle.reads:
                ctypes.memmove(target, source, size)
            self._over(handle, "DONE")
        return handle.state

    def release_xfer_handle(self, handle: FakeTransfer) -> None:
        assert handle.state != "PROC", "data would still come"

    def _over(self, handle: FakeTransfer, state: str) -> None:
        if handle.state == "PROC":
            self.fabric.under_way -= 1
        handle.state = state


def _covers(span: tuple[int, int, int, str], one: tuple[int, int, int, str]) -> bool:
    inside = span[0] <= one[0] and one[0] + one[1] <= span[0] + span[1]
    return inside and span[2:] == one[2:]
