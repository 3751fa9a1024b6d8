"""The part of NIXL's API that the transport uses.

NIXL's UCX backend uses RDMA if there is any, otherwise shared memory or TCP. It also works without a GPU.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Span = tuple[int, int]
"""(address, bytes)"""


class Agent(Protocol):
    """The interface of `nixl._api.nixl_agent`. Its exceptions have no common base class. Only one thread may
    call it.

    `mem_type` is "VRAM" or "DRAM". A transfer's state is "DONE", "PROC" (running) or "ERR".
    """

    name: str

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        """Register memory regions, each (address, bytes, device, ""). They stay registered until the process
        ends."""

    def get_agent_metadata(self) -> bytes:
        """Return the metadata for another agent's `add_remote_agent`. It covers only memory that is already
        registered."""

    def add_remote_agent(self, metadata: bytes) -> Any: ...
    def check_remote_metadata(self, agent: str) -> bool: ...
    def remove_remote_agent(self, agent: str) -> None: ...

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        """Make transfer descriptors from uint64 rows of (address, bytes, device)."""

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None:
        """Release the handle. A running transfer still continues (seen with NIXL 1.5.1)."""


def new_agent() -> Agent:
    """Make an agent. Raises ValueError if NIXL is not installed."""
    try:
        from nixl._api import nixl_agent
    except ImportError as error:
        raise ValueError(f"handoff.transport: nixl needs the package nixl ({error})") from error
    agent: Agent = nixl_agent(f"deltafront-{secrets.token_hex(8)}")
    return agent


@dataclass(frozen=True)
class Memory:
    mem_type: str
    device: int

    def register(self, agent: Agent, spans: Sequence[Span]) -> None:
        agent.register_memory([(*span, self.device, "") for span in spans], self.mem_type)

    def descriptors(self, agent: Agent, spans: Sequence[Span]) -> Any:
        rows = np.array([(*span, self.device) for span in spans], dtype=np.uint64)
        return agent.get_xfer_descs(rows, self.mem_type)


HOST = Memory("DRAM", 0)


def memory_of(device: torch.device) -> Memory:
    if device.type != "cuda":
        return HOST
    return Memory("VRAM", torch.cuda.current_device() if device.index is None else device.index)


class RegisteredWords:
    def __init__(self, agent: Agent, count: int) -> None:
        self._words = np.zeros(count, dtype=np.int64)
        HOST.register(agent, [(self._words.ctypes.data, self._words.nbytes)])

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def span(self, index: int) -> Span:
        size = self._words.itemsize
        return self._words.ctypes.data + index * size, size
