"""Hidden states on their way from one stage to the next. Only the numbers travel: both sides know shape and
order from the commands."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ...messages.stages import Rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_MEET = timedelta(seconds=120)


class LinkClosed(Exception):
    """The group is being taken down; nothing will arrive any more."""


class Activations(Protocol):
    """A stage's links to its neighbours."""

    def receive(self, tokens: int) -> torch.Tensor:
        """Return the next chunk's hidden_TC. On CUDA the stream waits, not the host."""

    def send(self, hidden_TC: torch.Tensor) -> None:
        """Return before it has arrived. Nobody may write to hidden_TC afterwards."""

    def close(self) -> None: ...

    def abort(self) -> None:
        """Close at once. What is on its way is lost, and whoever waits for it gets an error."""


class NoActivations:
    def receive(self, tokens: int) -> torch.Tensor:
        raise LinkClosed(f"a single stage has nobody to receive {tokens} rows from")

    def send(self, hidden_TC: torch.Tensor) -> None:
        raise LinkClosed(f"a single stage has nobody to send {hidden_TC.shape[0]} rows to")

    def close(self) -> None: ...

    def abort(self) -> None: ...


class GroupActivations:
    """Links stages in processes of their own, over torch.distributed: NCCL or gloo.

    Every link has its own process group, because a group serialises sends and receives, and a middle stage
    must receive while it still sends.
    """

    def __init__(
        self, store: Store, rank: int, stages: int, like: torch.Tensor, timeout_s: float = 1800.0
    ) -> None:
        """All ranks must call this at the same time.

        Args:
            like: an empty tensor [0, hidden] of the dtype and device that chunks have.
            timeout_s: the longest wait for one chunk over gloo.
        """
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            BACKENDS[like.device.type], store=store, rank=rank, world_size=stages, timeout=timeout
        )
        links = [dist.new_group([a, a + 1], timeout=timeout) for a in range(stages - 1)]
        self._before = links[rank - 1] if rank > 0 else None
        self._after = links[rank] if rank < stages - 1 else None
        self._rank = rank
        self._like = like
        self._sending: deque[tuple[torch.Tensor, Any]] = deque()
        self._depth = stages

    def receive(self, tokens: int) -> torch.Tensor:
        hidden_TC = self._like.new_empty(tokens, self._like.shape[1])
        work = dist.irecv(hidden_TC, src=self._rank - 1, group=self._before)
        if work is None:
            raise LinkClosed("this rank is not part of the link before it")
        work.wait()
        return hidden_TC

    def send(self, hidden_TC: torch.Tensor) -> None:
        while len(self._sending) >= self._depth:
            self._sending.popleft()[1].wait()
        hidden_TC = hidden_TC.contiguous()
        work = dist.isend(hidden_TC, dst=self._rank + 1, group=self._after)
        self._sending.append((hidden_TC, work))  # the buffer must outlive the transfer

    def close(self) -> None:
        while self._sending:
            self._sending.popleft()[1].wait()
        dist.destroy_process_group()

    def abort(self) -> None:
        self._sending.clear()
        dist.destroy_process_group()


def host_store(address: str, stages: int) -> tuple[TCPStore, Rendezvous]:
    """Make the first stage's store on a free port of `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)  # by itself it would listen everywhere
    port, handed_over = listening.getsockname()[1], listening.detach()
    store = TCPStore(
        address,
        port,
        stages,
        is_master=True,
        timeout=_MEET,
        wait_for_workers=False,
        master_listen_fd=handed_over,
    )
    return store, Rendezvous(address, port, secrets.token_bytes(16))


def join_store(rendezvous: Rendezvous, stages: int) -> TCPStore:
    address, port, _ = rendezvous
    return TCPStore(address, port, stages, is_master=False, timeout=_MEET, wait_for_workers=False)
