"""Tests hidden states between stages: in threads by queues, in processes by torch.distributed and shared
memory."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deltafront.tests.workers.in_process import QueueActivations
from deltafront.workers.prefill.stage.activations import (
    SLOTS,
    LinkClosed,
    NoActivations,
    PeerActivations,
)
from deltafront.workers.rendezvous import host_store

from ...strangers import Opened, listeners

RANKS = """
import os, sys, time, torch
from deltafront.workers.messages.stages import Rendezvous
from deltafront.workers.prefill.stage.activations import GroupActivations, PeerActivations
from deltafront.workers.rendezvous import join_store

stages, port, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
secret = bytes.fromhex(sys.argv[4])
torch.set_num_threads(1)
torch.multiprocessing.set_sharing_strategy("file_system")
dtype = torch.bfloat16

class SharedMemory:
    # stands in for a GPU's memory: the host's, mapped by both processes
    def export(self, x):
        from multiprocessing.reduction import ForkingPickler
        return bytes(ForkingPickler.dumps(x))
    def open(self, handle):
        import pickle
        return pickle.loads(handle)
    def mark(self):
        return None

like = torch.empty(0, 24, dtype=dtype)
sizes = [128, 128, 1, 77, 128, 128, 128, 5]

def sent(chunk):
    return torch.randn(sizes[chunk], 24, generator=torch.Generator().manual_seed(chunk)).to(dtype)

def run(rank):
    store = join_store(Rendezvous("127.0.0.1", port, secret), stages + 1)
    if kind == "group":
        ends = GroupActivations(store, rank, stages, like, timeout_s=60)
    else:
        ends = PeerActivations(store, rank, stages, 128, like, SharedMemory(), secret=secret, timeout_s=60)
    for chunk, tokens in enumerate(sizes):
        x = sent(chunk) if rank == 0 else ends.receive(tokens)
        assert x.shape == (tokens, 24) and x.dtype is dtype
        assert torch.equal(x, sent(chunk) * 2**rank), (rank, chunk)
        if rank < stages - 1:
            y = x * 2
            ends.send(y[:, :].t().contiguous().t() if chunk % 2 else y)
    os.write(1, f"ok {rank}\\n".encode())
    store.add("done", 1)
    while store.add("done", 0) < stages:  # what was sent must have arrived before this process ends
        time.sleep(0.01)
    ends.abort()

# Each rank is a process of its own. They are forked after the imports, which take most of the time.
process = torch.multiprocessing.get_context("fork").Process
ranks = [process(target=run, args=(rank,)) for rank in range(stages)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(max(abs(rank.exitcode) for rank in ranks))
"""
SECRET = b"known to all stages"


@pytest.mark.parametrize(("stages", "kind"), [(3, "group"), (2, "peer"), (4, "peer")])
def test_processes_send_chunks_to_the_next_stage_in_order(stages: int, kind: str) -> None:
    """By gloo, and by copies from one another's memory."""
    _store, (_, port, secret) = host_store("127.0.0.1", processes=stages + 1)
    command = [sys.executable, "-W", "ignore", "-c", RANKS, str(stages), str(port), kind, secret.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"ok {rank}" for rank in range(stages)]


def test_rendezvous_store_listens_only_on_its_address() -> None:
    """A connection to another address of this machine fails."""
    store, (address, port, _) = host_store("127.0.0.1", processes=1)
    assert [host for host, listening, _ in listeners(os.getpid()) if listening == port] == [address]
    store.set("ring/0", "ours")
    assert store.get("ring/0") == b"ours"
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port)):
        pass


def test_queues_send_chunks_to_the_next_stage_in_order() -> None:
    first, middle, last = QueueActivations.chain(3)
    chunks = [torch.full((n, 4), float(n)) for n in (3, 1, 2)]

    def forward() -> None:
        for n in (3, 1, 2):
            middle.send(middle.receive(n) + 1)

    thread = threading.Thread(target=forward)
    thread.start()
    for chunk in chunks:
        first.send(chunk)
    for chunk in chunks:
        assert torch.equal(last.receive(len(chunk)), chunk + 1)
    thread.join(5)


def test_closed_link_wakes_the_stage_that_waits_for_it() -> None:
    first, last = QueueActivations.chain(2)
    threading.Timer(0.05, first.abort).start()
    with pytest.raises(LinkClosed):
        last.receive(3)


def test_wrong_number_of_rows_closes_the_link() -> None:
    first, last = QueueActivations.chain(2)
    first.send(torch.zeros(3, 4))
    with pytest.raises(LinkClosed, match="3 rows came, 4 were expected"):
        last.receive(4)


def test_first_and_last_stage_have_only_one_link() -> None:
    first, last = QueueActivations.chain(2)
    for ends in (NoActivations(), first):
        with pytest.raises(LinkClosed):
            ends.receive(1)
    for ends in (NoActivations(), last):
        with pytest.raises(LinkClosed):
            ends.send(torch.zeros(1, 4))


# --- by copies from a neighbour's memory ------------------------------------------------------------------


class OneProcess:
    """The memory of stages that are threads of this process. `happened` collects the work that their devices
    still have to do."""

    def __init__(self) -> None:
        self.exported: list[torch.Tensor] = []
        self.happened = threading.Event()
        self.happened.set()

    def export(self, x: torch.Tensor) -> int:
        self.exported.append(x)
        return len(self.exported) - 1

    def open(self, handle: int) -> torch.Tensor:
        return self.exported[handle]

    def mark(self) -> OneProcess:
        return self

    def synchronize(self) -> None:
        assert self.happened.wait(60)


def neighbours(*memory: OneProcess) -> list[PeerActivations]:
    """Return linked stages, one for each memory's device."""
    store, like = dist.HashStore(), torch.empty(0, 4)  # type: ignore[attr-defined]
    shared = memory[0].exported
    for one in memory:
        one.exported = shared
    stages = len(memory)
    with ThreadPoolExecutor(stages) as pool:
        ends = [
            pool.submit(PeerActivations, store, rank, stages, 8, like, one, secret=SECRET, timeout_s=20.0)  # type: ignore[arg-type]
            for rank, one in enumerate(memory)
        ]
        return [end.result(60) for end in ends]


def test_ring_slot_is_reused_only_after_it_was_copied() -> None:
    sender, receiver = OneProcess(), OneProcess()
    first, last = neighbours(sender, receiver)
    receiver.happened.clear()
    for n in range(SLOTS):
        first.send(torch.full((2, 4), float(n)))
    copied = [last.receive(2) for _ in range(SLOTS)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(first.send, torch.full((2, 4), 9.0))
        with pytest.raises(TimeoutError):
            sending.result(0.2)
        assert float(sender.exported[0][0, 0, 0]) == 0.0, "the copy of it is only launched"
        receiver.happened.set()
        sending.result(60)
    assert [float(x[0, 0]) for x in [*copied, last.receive(2)]] == [0.0, 1.0, 2.0, 9.0]
    first.abort()
    last.abort()


def test_chunk_is_announced_to_the_next_stage_only_when_computed() -> None:
    sender, receiver = OneProcess(), OneProcess()
    first, last = neighbours(sender, receiver)
    sender.happened.clear()
    first.send(torch.ones(2, 4))
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(last.receive, 2)
        with pytest.raises(TimeoutError):
            receiving.result(0.2)
        sender.happened.set()
        assert torch.equal(receiving.result(60), torch.ones(2, 4))
    first.abort()
    last.abort()


def test_dead_neighbour_wakes_the_stage_that_waits_for_it() -> None:
    first, middle, last = neighbours(OneProcess(), OneProcess(), OneProcess())
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(last.receive, 2)
        for _ in range(SLOTS):
            first.send(torch.ones(2, 4))
        sending = pool.submit(first.send, torch.ones(2, 4))
        middle.abort()
        for waiting in (receiving, sending):
            with pytest.raises(LinkClosed, match="is gone"):
                waiting.result(60)
    for end in (first, last):
        end.abort()
        with pytest.raises(LinkClosed, match=r"no stage is|is gone"):
            end.receive(1)


@pytest.mark.parametrize("written", ["a pickle", "no address", "not JSON"])
def test_forged_store_entry_only_breaks_the_link(written: str, tmp_path: Path) -> None:
    """The entry is never unpickled."""
    said = {"a pickle": pickle.dumps(Opened(tmp_path / "opened")).hex(), "no address": "7", "not JSON": "{"}
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("ring/0", said[written])
    with pytest.raises(LinkClosed, match="stage 0 is not where the group's store says"):
        PeerActivations(store, 1, 2, 8, torch.empty(0, 4), OneProcess(), secret=SECRET)  # type: ignore[arg-type]
    assert not (tmp_path / "opened").exists()


def test_unpickles_nothing_from_a_peer_without_the_secret(tmp_path: Path) -> None:
    """The store's entry leads to a peer that answers any challenge and sends a pickle."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with Listener(family="AF_UNIX", authkey=None) as stranger, ThreadPoolExecutor(1) as pool:
        store.set("ring/0", json.dumps(stranger.address))

        def answer() -> None:
            with stranger.accept() as connection:
                connection.send_bytes(b"#CHALLENGE#{sha256}" + bytes(32))
                connection.recv_bytes()
                connection.send_bytes(b"#WELCOME#")
                connection.recv_bytes()
                connection.send_bytes(b"made up")
                connection.send(Opened(tmp_path / "opened"))

        answering = pool.submit(answer)
        with pytest.raises(LinkClosed, match="stage 0 is not where"):
            PeerActivations(store, 1, 2, 8, torch.empty(0, 4), OneProcess(), secret=SECRET)  # type: ignore[arg-type]
        answering.exception(60)
    assert not (tmp_path / "opened").exists()
