"""Tensor parallelism in a decode worker. Each rank has a share of the heads, their KV cache, and its part of
every layer's matrices. Every rank has the whole embedding and the whole expert router.

Rank 0 runs the scheduler. It sends each call to the other ranks before it makes the call itself, so all ranks
make the same calls in the same order and meet in each layer's collectives. A page has the same number on all
ranks. In a KV hand-off, each rank copies only its own heads.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deltafront.kernels.layers.one_shot_reduce import OneShotAddNorm, OneShotReduce, own_memory
from deltafront.workers.decode.decode_attention import LayerPlan, plan_layers
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, ReadPart, ReadResult, ReadStates
from deltafront.workers.decode.step_rows import LaunchedStep, Row
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.fetch import to_host
from deltafront.workers.kv.handoff.protocols import KVReader, UsePages
from deltafront.workers.kv.host_memory import RankStates, make_host_memory
from deltafront.workers.kv.pages.host_tier import Runs
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.kv.pages.request_pages import PageCopy
from deltafront.workers.kv.peer_memory import CudaPeerMemory
from deltafront.workers.messages.requests import DecodeFailed
from deltafront.workers.messages.stages import HostKV, KVAnnouncement, KVRange, Rendezvous
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, GroupCollectives
from deltafront.workers.model.decoder.load import load_model, set_up_compute_thread
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.digest import content_digest
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.grammars import Mask
from deltafront.workers.progress import Tell, silent
from deltafront.workers.rendezvous import BACKENDS, join_store
from deltafront.workers.roles import Rank
from deltafront.workers.settings import DecodeConfig, ModelSpec
from deltafront.workers.waits import said_when_slow

log = logging.getLogger(__name__)

ReaderMaker = Callable[[PagedKVCache, Executor], KVReader]


def device_of_rank(config: DecodeConfig, rank: int) -> str:
    """Return a rank's device. If ranks request no GPUs from Ray, they see all GPUs, and rank i takes GPU
    i."""
    shared = config.device == "cuda" and config.gpus == 0 and config.tensor_parallel > 1
    return f"cuda:{rank}" if shared else config.device


def make_threads(config: DecodeConfig, rank: int = 0) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Return the compute thread and the hand-off thread."""
    arguments = config.threads, device_of_rank(config, rank)
    compute, handoff = (
        ThreadPoolExecutor(1, f"decode-{work}", set_up_compute_thread, arguments)
        for work in ("compute", "handoff")
    )
    return compute, handoff


def runner_sizes(config: DecodeConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `DecodeRunner` that are the same on every rank."""
    pages = config.cache_tokens // PAGE_TOKENS
    return {
        "pages": pages,
        "max_batch": config.max_batch,
        "max_pages": min(pages, pages_for(model.positions)),
        "kv_dtype": config.kv_dtype,
        "state_slots": config.state_slots,
    }


class LeadRunner(DecodeRunner):
    """Rank 0's runner. It sends every call to the other ranks, too.

    A call that fails leaves the ranks out of step, so all later calls fail.
    """

    def __init__(self, stack: LayerStack, plan: LayerPlan, ranks: Sequence[Rank] = (), **sizes: Any) -> None:
        super().__init__(stack, plan, **sizes)
        self.ranks = ranks
        self._sent: tuple[int, ...] = ()
        """Keys of the batch's rows that the other ranks have received."""
        self.fault = ""
        """The reason to replace the worker; empty while the ranks are in step."""

    def lose(self, error: BaseException) -> None:
        """Record that a rank is lost or out of step; later calls fail."""
        self.fault = self.fault or f"its ranks are out of step: {type(error).__name__}: {error}"

    @contextmanager
    def _on_all(self, work: str, *arguments: Any) -> Iterator[None]:
        """Send a call to the other ranks. The `with` block makes the same call on rank 0."""
        if self.fault:
            raise RuntimeError(self.fault)
        try:
            for rank in self.ranks:
                rank.compute(work, *arguments)
            yield
        except Exception as error:
            if self.ranks:
                self.lose(error)
            raise

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        with self._on_all("copy_pages", copies):
            super().copy_pages(copies)

    def append(
        self,
        pages: Sequence[int],
        step: Read,
        last: bool,
        copy: PageCopy | None = None,
        part: ReadPart | None = None,
        states: ReadStates | None = None,
    ) -> ReadResult:
        with self._on_all("append", pages, step, last, copy, part, states):
            return super().append(pages, step, last, copy, part, states)

    def forget_read(self, key: int) -> None:
        with self._on_all("forget_read", key):
            super().forget_read(key)

    def recompute(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        ids: Sequence[int],
        question: Read,
        last: bool,
        part: ReadPart | None = None,
    ) -> ReadResult:
        with self._on_all("recompute", pages, blocks, ids, question, last, part):
            return super().recompute(pages, blocks, ids, question, last, part)

    def launch(self, rows: Sequence[Row], masks: Sequence[Mask | None] = ()) -> LaunchedStep:
        with self._on_all("launch", self._unsent(rows), masks):
            return super().launch(rows, masks)

    def forward(self, rows: Sequence[Row]) -> None:
        with self._on_all("forward", self._unsent(rows)):
            super().forward(rows)

    def choose(self, masks: Sequence[Mask | None]) -> LaunchedStep:
        with self._on_all("choose", masks):
            return super().choose(masks)

    def _unsent(self, rows: Sequence[Row]) -> Sequence[Row] | None:
        """Return the rows to send to the other ranks; None if the previous batch that was sent had the same
        requests."""
        keys = tuple(row.key for row in rows)
        if keys == self._sent:
            return None
        self._sent = keys
        return rows

    def compile(self) -> None:
        self._sent = ()
        with self._on_all("compile"):
            super().compile()


class FollowerRank:
    """A tensor-parallel worker (rank > 0) that executes the calls rank 0 sends.

    Args:
        reader: Makes the transport's `KVReader`.
        digest: The model's content digest if KV is saved to disk; else empty.
    """

    def __init__(
        self, stack: LayerStack, config: DecodeConfig, reader: ReaderMaker, digest: str = ""
    ) -> None:
        model = stack.config
        plan = plan_layers(config, model.layers, model.windows, model.linear_layers)
        self.fault = ""
        """The reason to replace the worker; empty until a call fails."""
        self._runner = DecodeRunner(stack, plan, **runner_sizes(config, model))
        self._compute, self._handoff = make_threads(config, stack.collectives.rank)
        self._reader = reader(self._runner.cache, self._handoff)
        self._host = make_host_memory(self._runner.cache, config, digest)
        self._rows: Sequence[Row] = ()
        self._stack = stack

    def join(self, rendezvous: Rendezvous) -> None:
        join_ranks(self._stack, rendezvous)

    def compute(self, work: str, *arguments: Any) -> None:
        self._compute.submit(self._run, work, *arguments)

    def _run(self, work: str, *arguments: Any) -> None:
        if self.fault:
            return
        try:
            if work in ("launch", "forward"):
                arguments = (self._known(arguments[0]), *arguments[1:])
            getattr(self._runner, work)(*arguments)
        except Exception as error:
            log.exception("a rank of a decode worker failed")
            self.fault = f"{work} failed: {type(error).__name__}: {error}"

    def _known(self, rows: Sequence[Row] | None) -> Sequence[Row]:
        """Return the rows of the next step. None: those of the last step, each one token longer."""
        if rows is not None:
            self._rows = rows
        elif self._runner.states is not None:  # which are copied at page boundaries
            self._rows = [replace(row, length=row.length + 1) for row in self._rows]
        return self._rows

    async def read(self, announcement: KVAnnouncement, layers: Sequence[int], pages: Sequence[int]) -> int:
        return await self._reader.read(announcement, layers, lambda: nullcontext(pages)) or 0

    async def kv(self, wanted: KVRange, pages: Sequence[int]) -> HostKV:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._handoff, to_host, self._runner.cache, pages, wanted)

    async def move(self, runs: Runs, layers: range, back: bool) -> None:
        assert self._host is not None
        await asyncio.get_running_loop().run_in_executor(self._handoff, self._host.copy, runs, layers, back)

    async def state(self, work: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self.ordered(work, *arguments))

    def ordered(self, work: str, *arguments: Any) -> Future[Any]:
        """Begin `Rank.state`."""
        return self._compute.submit(self._on_state, work, *arguments)

    def _on_state(self, work: str, *arguments: Any) -> Any:
        if self.fault:
            raise DecodeFailed(self.fault)
        self._runner.wait()
        return getattr(RankStates(self._runner.cache, self._host), work)(*arguments)

    async def stored(self, work: str, name: bytes, slots: Sequence[int], state: int) -> None:
        assert self._host is not None
        await self._host.stored(work, name, slots, state)

    def close(self) -> None:
        with said_when_slow(lambda: "the threads of a decode worker's rank, to close it"):
            self._compute.shutdown()
            if self._host is not None:
                self._host.close()
            self._handoff.shutdown()


class InOrder:
    """Makes numbered calls in the order 0, 1, 2, …, in whatever order they arrive. Each number is used
    once."""

    def __init__(self) -> None:
        self._expected = 0
        self._early: dict[int, Callable[[], object]] = {}

    def __call__(self, number: int, call: Callable[[], object]) -> None:
        self._early[number] = call
        while self._expected in self._early:
            self._early.pop(self._expected)()
            self._expected += 1


class RanksReader:
    """A `KVReader` that makes each rank copy its own heads. It calls `lose` when a rank is gone.

    The pages stay in use until all ranks have finished copying. A resumed prompt waits until then.
    """

    def __init__(self, own: KVReader, ranks: Sequence[Rank], lose: Callable[[BaseException], None]) -> None:
        self._own, self._ranks, self._lose = own, ranks, lose

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        with use_pages() as pages:
            if pages is None:
                return None
            reads = [self._own.read(announcement, layers, lambda: nullcontext(pages))]
            reads += [rank.read(announcement, layers, pages) for rank in self._ranks]
            # Even if one rank fails, the pages stay in use until the last rank has finished.
            moved = await asyncio.gather(*reads, return_exceptions=True)
        failures = [outcome for outcome in moved if isinstance(outcome, BaseException)]
        for failure in failures:
            if isinstance(failure, DecodeFailed):
                self._lose(failure)
        if failures:
            raise failures[0]
        return sum(count for count in moved if isinstance(count, int))


def joined_heads(parts: Sequence[HostKV]) -> HostKV:
    """Concatenate the KV heads of all ranks."""
    if len(parts) == 1:
        return parts[0]
    sides = zip(*((part.k, part.v, *part.scales) for part in parts), strict=True)
    k, v, *scales = (np.concatenate(side, axis=1) for side in sides)
    return HostKV(k=k, v=v, scales=tuple(scales))


def load_part(model: ModelSpec, config: DecodeConfig, rank: int, tell: Tell = silent) -> LayerStack:
    """Load a rank's part of the model, and set the number of torch's threads.

    With several ranks, call `join_ranks` before any computation. Raises ModelError.
    """
    torch.set_num_threads(config.threads)
    ranks = config.tensor_parallel
    collectives = SINGLE_RANK if ranks == 1 else GroupCollectives(rank, ranks)
    return load_model(model, device_of_rank(config, rank), collectives=collectives, tell=tell)


def load_rank(
    rank: int, model: ModelSpec, config: DecodeConfig, *, reader: ReaderMaker, tell: Tell = silent
) -> FollowerRank:
    return FollowerRank(load_part(model, config, rank, tell), config, reader, store_digest(model, config))


def store_digest(model: ModelSpec, config: DecodeConfig) -> str:
    """Return the content digest of the model's weights if KV is saved to disk; else an empty string."""
    return content_digest(model) if config.store else ""


def join_ranks(stack: LayerStack, rendezvous: Rendezvous) -> None:
    """Connect this process to the other ranks. All ranks must call this at the same time."""
    device, collectives = stack.device, stack.collectives
    if device.index is not None:
        torch.cuda.set_device(device)
    store = join_store(rendezvous, collectives.ranks)
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=collectives.rank, world_size=collectives.ranks
    )
    assert isinstance(collectives, GroupCollectives) and dist.group.WORLD is not None
    shots = one_shots(collectives.rank, collectives.ranks, device) if device.type == "cuda" else None
    collectives.connect(dist.group.WORLD, shots)


def one_shots(rank: int, ranks: int, device: torch.device) -> tuple[OneShotReduce, OneShotAddNorm]:
    """Make the one-shot all-reduces, which access the other ranks' memory directly. All ranks must call this
    at the same time.
    """
    return OneShotReduce(rank, _exchanged(rank, ranks, device)), OneShotAddNorm(
        rank, _exchanged(rank, ranks, device)
    )


def _exchanged(rank: int, ranks: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    peers, own = CudaPeerMemory(device), own_memory(ranks, device)
    torch.cuda.synchronize(device)  # else this rank may zero the memory after another rank wrote to it
    handles: list[Any] = [None] * ranks
    dist.all_gather_object(handles, [peers.export(x) for x in own])
    return [own if n == rank else (peers.open(a), peers.open(b)) for n, (a, b) in enumerate(handles)]
