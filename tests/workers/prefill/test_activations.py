"""Hidden states between stages: threads by queue, processes by torch.distributed."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from deltafront.workers.prefill.activations import LinkClosed, NoActivations, QueueActivations, host_store

RANK = """
import sys, torch
from deltafront.workers.prefill.activations import GroupActivations, join_store

rank, stages, port = int(sys.argv[1]), 3, int(sys.argv[2])
torch.set_num_threads(1)
store = join_store("127.0.0.1", port, stages + 1)
dtype = torch.bfloat16
ends = GroupActivations(store, rank, stages, hidden=24, dtype=dtype, device=torch.device("cpu"), timeout_s=60)
sizes = [128, 128, 1, 77, 128, 128, 128, 5]

def sent(chunk):
    return torch.randn(sizes[chunk], 24, generator=torch.Generator().manual_seed(chunk)).to(dtype)

for chunk, tokens in enumerate(sizes):
    x = sent(chunk) if rank == 0 else ends.receive(tokens)
    assert x.shape == (tokens, 24) and x.dtype is dtype
    assert torch.equal(x, sent(chunk) * 2**rank), (rank, chunk)
    if rank < stages - 1:
        y = x * 2 if rank < stages - 1 else x
        ends.send(y[:, :].t().contiguous().t() if chunk % 2 else y)
if rank == stages - 1:
    print("ok")
ends.close()
"""


def test_three_processes_pass_chunks_on_in_order() -> None:
    store = host_store("127.0.0.1", stages=4)
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert outputs[2].strip() == "ok"


def test_queues_pass_chunks_on_in_order() -> None:
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


def test_a_closed_link_wakes_its_reader() -> None:
    first, last = QueueActivations.chain(2)
    threading.Timer(0.05, first.close).start()
    with pytest.raises(LinkClosed):
        last.receive(3)


def test_stages_out_of_step_are_noticed() -> None:
    first, last = QueueActivations.chain(2)
    first.send(torch.zeros(3, 4))
    with pytest.raises(LinkClosed, match="3 rows came, 4 were expected"):
        last.receive(4)


def test_the_ends_of_a_pipeline_have_no_neighbour() -> None:
    first, last = QueueActivations.chain(2)
    for ends in (NoActivations(), first):
        with pytest.raises(LinkClosed):
            ends.receive(1)
    for ends in (NoActivations(), last):
        with pytest.raises(LinkClosed):
            ends.send(torch.zeros(1, 4))
