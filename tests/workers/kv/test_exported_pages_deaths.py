"""Tests a decode worker that dies while it reads a stage's pages, with real processes and Ray.

A file that both processes map takes the place of GPU memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.cuda_ipc import CudaIpcExporter, CudaIpcReader
from deltafront.workers.kv.handoff.outbox import ActorOutbox
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError
from deltafront.workers.kv.handoff.stream import MessageSender
from deltafront.workers.messages.states import NAMESPACE

LAYERS, HEADS, DIM, TOKENS = range(2, 5), 2, 8, 64
PATIENCE_S = 120.0
SHAPE = (len(LAYERS), 8, 16, HEADS, DIM)
"""The shape of each tensor of the stage's cache: eight pages, four for each request."""


class MappedFiles:
    """Implements `PeerMemory` for tensors in files."""

    home = "a host"

    def __init__(self, files: dict[int, str]) -> None:
        self._files = files

    def export(self, x: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        return self._files[x.data_ptr()], tuple(x.shape)

    def open(self, handle: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        path, shape = handle
        return mapped(path, shape)

    def mark(self) -> None:
        return None

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        """Do nothing: the stage outlives the test."""


def mapped(path: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.from_file(path, shared=True, size=count, dtype=torch.float32).view(shape)


def reader_class() -> type:
    """Return the class of an actor that reads KV like a decode worker. It is local, so that Ray pickles it by
    value."""

    class Reader:
        """Writes the first layer's KV, reports this with a file, and continues once another file exists."""

        def __init__(self, begun: str, go: str) -> None:
            self.cache = PagedKVCache(LAYERS, HEADS, DIM, 4, torch.float32, "cpu")
            plain = self.cache.write_layers

            def slowly(pages: Any, start: int, parts: dict[int, Any], *rest: Any) -> None:
                for layer, sides in parts.items():
                    plain(pages, start, {layer: sides}, *rest)
                    Path(begun).touch()
                    while not Path(go).exists():
                        time.sleep(0.01)

            self.cache.write_layers = slowly  # type: ignore[method-assign]
            thread = ThreadPoolExecutor(1)
            self.reader = CudaIpcReader(self.cache, thread, MappedFiles({}))

        async def announce(self, announcement: Any) -> None:
            @contextmanager
            def use_pages() -> Any:
                yield range(4)

            layers = range(announcement.layer, announcement.layer + announcement.layers)
            await self.reader.read(announcement, layers, use_pages)

        async def held(self) -> Any:
            return [self.cache.gather(layer, torch.arange(4), TOKENS) for layer in LAYERS]

    return Reader


def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.02)


def test_decode_worker_that_dies_mid_copy_fails_only_its_own_request(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = PagedKVCache(LAYERS, HEADS, DIM, 8, torch.float32, "cpu")
    files = {}
    for side in ("k_LPSGD", "v_LPSGD"):
        path = tmp_path / side
        path.write_bytes(torch.zeros(SHAPE).numpy().tobytes())
        setattr(stage, side, mapped(str(path), SHAPE))
        files[getattr(stage, side).data_ptr()] = str(path)
    exporter = CudaIpcExporter(stage, MappedFiles(files), PATIENCE_S)
    sender = MessageSender(exporter, ActorOutbox(1 << 30, PATIENCE_S), background=False)
    streams = {}
    readers = {}
    for name in ("dies", "lives"):
        gates = [str(tmp_path / f"{name}.{gate}") for gate in ("begun", "go")]
        actor = ray.remote(reader_class()).options(name=f"decode:{name}", namespace=NAMESPACE, num_cpus=0)
        readers[name] = actor.remote(*gates)
    made: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"dies": [], "lives": []}
    for name, pages in (("dies", range(4)), ("lives", range(4, 8))):
        to = Destination(request_id=name, decode_worker=f"decode:{name}", pages=pages)
        streams[name] = sender.open(to)
        for layer in LAYERS:
            k, v = torch.randn(2, TOKENS, HEADS, DIM)
            stage.write(layer, torch.tensor(pages), 0, k, v)
            streams[name].put(layer, 0, k, v)
            made[name].append((k, v))
    ends = {name: stream.end_chunk() for name, stream in streams.items()}
    until(lambda: all((tmp_path / f"{name}.begun").exists() for name in readers))
    assert not streams["dies"].close() and not streams["lives"].close(), "both are being read"

    ray.kill(readers["dies"])
    until(streams["dies"].close)
    assert not streams["lives"].close()
    with pytest.raises(HandoffError, match="decode:dies did not take KV"):
        ends["dies"]()
    stage.write(LAYERS.start, torch.arange(4), 0, *torch.full((2, TOKENS, HEADS, DIM), torch.nan))

    (tmp_path / "lives.go").touch()
    until(streams["lives"].close)
    ends["lives"]()
    for (k, v), (got_k, got_v) in zip(made["lives"], ray.get(readers["lives"].held.remote()), strict=True):
        assert torch.equal(got_k.transpose(0, 1), k) and torch.equal(got_v.transpose(0, 1), v)
    ray.kill(readers["lives"])
