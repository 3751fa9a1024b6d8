"""Runs a decode worker's ranks as threads of one process, linked by gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from deltafront.workers.decode.ranks import FollowerRank, ReaderMaker
from deltafront.workers.kv.handoff.object_store import ObjectStoreReader
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, GroupCollectives
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec
from deltafront.workers.settings import DecodeConfig


def part(directory: Path, rank: int, ranks: int) -> LayerStack:
    config = read_config(directory)
    spec = StackSpec(
        config=config,
        layers=range(config.layers),
        embedding=True,
        head=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
        rank=rank,
        ranks=ranks,
    )
    collectives = SINGLE_RANK if ranks == 1 else GroupCollectives(rank, ranks)
    return load_stack(directory, spec, collectives=collectives)


def parts(directory: Path, ranks: int) -> list[LayerStack]:
    """Return the ranks' parts of a model, linked. Each waits for the others when it computes."""
    stacks = [part(directory, rank, ranks) for rank in range(ranks)]
    link(stacks)
    return stacks


def link(stacks: Sequence[LayerStack]) -> None:
    """Connect the stacks of one worker, each with a `GroupCollectives`, by gloo."""
    store, group = HashStore(), dist.ProcessGroupGloo

    def connect(stack: LayerStack) -> None:
        collectives = stack.collectives
        assert isinstance(collectives, GroupCollectives)
        made: Any = group(store, collectives.rank, len(stacks), timedelta(seconds=300))
        collectives.connect(made)

    with ThreadPoolExecutor(len(stacks)) as threads:
        list(threads.map(connect, stacks))


@contextmanager
def followers(
    stacks: Sequence[LayerStack], config: DecodeConfig, reader: ReaderMaker = ObjectStoreReader
) -> Iterator[list[FollowerRank]]:
    """Start the ranks other than 0.

    Raises:
        RuntimeError: One of the ranks has failed.
    """
    ranks = [FollowerRank(stack, config, reader) for stack in stacks[1:]]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()
    faults = [rank.fault for rank in ranks if rank.fault]
    if faults:
        raise RuntimeError(faults[0])


def unused(_cache: Any, _thread: Executor) -> Any:
    """A `ReaderMaker` for ranks that receive no KV."""
