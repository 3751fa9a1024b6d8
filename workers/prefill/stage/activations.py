"""Sends hidden states from one pipeline stage to the next.

They have no headers, because both stages know shapes and order from the controller's commands. Between GPUs
of one host (`PeerActivations`), the next stage copies them from a ring buffer in this stage's memory with the
GPU's copy engine; NCCL would take multiprocessors from the GEMMs. Over a socket the two processes tell each
other how many chunks they have written and copied. A host thread waits for the device before it sends a
count, so no CUDA stream waits for another process, and the death of a neighbour is noticed at once.

Shape suffixes also: N slots of a ring.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from deltafront.workers.kv.peer_memory import CudaPeerMemory, PeerMemory, home
from deltafront.workers.messages.stages import Rendezvous
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.rendezvous import BACKENDS, join_store
from deltafront.workers.settings import PrefillConfig

SLOTS = 3
"""Slots of a ring: one chunk is being copied, one waits, and one is being written."""


class LinkClosed(Exception):
    """The link was closed because the group shuts down."""


class Activations(Protocol):
    """A stage's links to its neighbours."""

    def receive(self, tokens: int) -> torch.Tensor:
        """Return the next chunk's hidden_TC. On CUDA the stream waits for it, not the host."""

    def send(self, hidden_TC: torch.Tensor) -> None:
        """Start to send hidden_TC. The caller must not write to it afterwards."""

    def abort(self) -> None:
        """Close the links at once. Chunks in transit are lost, and waiting stages get an error."""


class NoActivations:
    def receive(self, tokens: int) -> torch.Tensor:
        raise LinkClosed(f"a single stage cannot receive {tokens} rows: it has no neighbour")

    def send(self, hidden_TC: torch.Tensor) -> None:
        raise LinkClosed(f"a single stage cannot send {hidden_TC.shape[0]} rows: it has no neighbour")

    def abort(self) -> None: ...


class GroupActivations:
    """Links stages by torch.distributed, with NCCL or gloo.

    Each pair of neighbours has its own process group. A process group serialises sends and receives, but a
    middle stage must receive while it still sends.
    """

    def __init__(
        self, store: Store, rank: int, stages: int, like: torch.Tensor, timeout_s: float = 1800.0
    ) -> None:
        """Connect to the other stages. All stages must call this at the same time.

        Args:
            like: An empty tensor [0, hidden] with the dtype and device of the hidden states.
            timeout_s: Maximum number of seconds to wait for one chunk over gloo.
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

    def abort(self) -> None:
        self._sending.clear()
        dist.destroy_process_group()


class _Link:
    """The link to one neighbour, with the ring between the two stages.

    Args:
        mark: Records a CUDA event after everything launched so far. A count is sent once the event is
            reached.
        timeout_s: Maximum number of seconds to wait for the neighbour's next count.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        ring_NTC: torch.Tensor,
        mark: Callable[[], Any],
        timeout_s: float,
    ) -> None:
        self._connection, self._mark, self._timeout_s = connection, mark, timeout_s
        self.ring_NTC = ring_NTC
        self.written = self.copied = 0
        self._sending = ThreadPoolExecutor(1, "activations")

    def send_count(self, number: int) -> None:
        self._sending.submit(self._send, self._mark(), number)

    def receive_count(self) -> int:
        """Wait for the neighbour's next count. Raises LinkClosed if the neighbour is gone or too slow."""
        try:
            if self._connection.poll(self._timeout_s):
                return int(self._connection.recv())
        except (EOFError, OSError):
            raise LinkClosed("the stage beside this one is gone") from None
        raise LinkClosed(f"the stage beside this one was silent for {self._timeout_s:g} s")

    def abort(self) -> None:
        self._sending.shutdown(wait=False, cancel_futures=True)
        self._connection.close()

    def _send(self, event: Any, number: int) -> None:
        if event is not None:
            event.synchronize()
        with contextlib.suppress(OSError):  # `receive_count` reports that the neighbour is gone
            self._connection.send(number)


class PeerActivations:
    """Links stages by GPU memory that both map. All stages must construct this at the same time, with the
    same store, secret and sizes.

    The store only has the addresses on which stages listen. A neighbour must prove that it knows the secret
    before this stage unpickles anything from it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        stages: int,
        chunk_tokens: int,
        like: torch.Tensor,
        peers: PeerMemory,
        *,
        secret: bytes,
        timeout_s: float = 1800.0,
    ) -> None:
        """Connect to the neighbours; `like` as in `GroupActivations`. Raises LinkClosed if one is missing."""
        self._before: _Link | None = None
        self._after: _Link | None = None
        listener = None
        if rank < stages - 1:
            ring_NTC = like.new_empty(SLOTS, chunk_tokens, like.shape[1])
            listener = Listener(family="AF_UNIX", authkey=secret)
            store.set(f"ring/{rank}", json.dumps(listener.address))
        if rank > 0:
            connection = _connected(store, rank - 1, secret)
            self._before = _Link(connection, peers.open(connection.recv()), peers.mark, timeout_s)
        if listener is not None:
            with listener:
                connection = listener.accept()
            connection.send(peers.export(ring_NTC))
            self._after = _Link(connection, ring_NTC, peers.mark, timeout_s)

    def receive(self, tokens: int) -> torch.Tensor:
        """Wait until the previous stage has written the next chunk, and launch the copy from the ring."""
        link = self._before
        if link is None:
            raise LinkClosed(f"the first stage cannot receive {tokens} rows: no stage is before it")
        number = link.receive_count()
        if number != link.copied + 1:
            raise LinkClosed(f"stages out of step: chunk {number} came, {link.copied + 1} was expected")
        slot_TC = link.ring_NTC[link.copied % SLOTS, :tokens]
        hidden_TC = torch.empty_like(slot_TC).copy_(slot_TC)
        link.copied = number
        link.send_count(number)
        return hidden_TC

    def send(self, hidden_TC: torch.Tensor) -> None:
        """Wait for a free slot of the ring, and launch the copy into it."""
        link = self._after
        if link is None:
            raise LinkClosed("the last stage cannot send: no stage is after it")
        while link.written - link.copied >= SLOTS:
            link.copied = link.receive_count()
        link.ring_NTC[link.written % SLOTS, : hidden_TC.shape[0]].copy_(hidden_TC)
        link.written += 1
        link.send_count(link.written)

    def abort(self) -> None:
        """Close the links. The neighbour's memory stays mapped as long as this object exists, because the
        device may still copy from it."""
        for link in (self._before, self._after):
            if link is not None:
                link.abort()


def _connected(store: Store, rank: int, secret: bytes) -> Connection[Any, Any]:
    try:
        return Client(json.loads(store.get(f"ring/{rank}")), "AF_UNIX", secret)
    except (ValueError, TypeError, OSError, EOFError, AuthenticationError) as error:
        raise LinkClosed(f"stage {rank} is not where the group's store says: {error}") from None


def connect_neighbours(
    store: Store | None, rank: int, config: PrefillConfig, stack: LayerStack, rendezvous: Rendezvous
) -> Activations:
    """Connect a stage to its neighbours: by shared GPU memory if all stages are on GPUs of one host,
    otherwise by torch.distributed. `store` is None except on the first stage, which has opened it."""
    stages = config.stages
    store = join_store(rendezvous, stages) if store is None else store
    like = torch.empty(0, stack.config.hidden, dtype=stack.dtype, device=stack.device)
    if like.device.type == "cuda":
        store.set(f"home/{rank}", home())
        if len({store.get(f"home/{other}") for other in range(stages)}) == 1:
            memory, secret = CudaPeerMemory(like.device), rendezvous.secret
            return PeerActivations(store, rank, stages, config.chunk_tokens, like, memory, secret=secret)
    return GroupActivations(store, rank, stages, like)
