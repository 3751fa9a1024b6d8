"""A group of a decode worker's store, saved and loaded by several libraries on one machine.

    python -m deltafront.benchmarks.stores FOLDER [--only plain kv_files nixl mooncake] [--int8]

A group is 256 tokens of the 8B shape, 32 MiB in 16 bits. The stores take turns, so that other work on the
machine meets all alike. `saved` ends when the call returns, and flushes nothing. `loaded` finds the file in
the page cache. `cold` reads it again after it was flushed and dropped from there. Mooncake Store has no file:
it moves K/V over TCP to the memory of another process of this host. nixl and mooncake need their packages
(`nixl==1.5.1`, `mooncake-transfer-engine-non-cuda==0.3.13.post1` and libibverbs).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.kv_files import KVFiles
from deltafront.workers.kv.pages.store_tier import GROUP_PAGES

_LAYERS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_NAME = bytes(32)
_MASTER = "127.0.0.1:50051"


class Store(Protocol):
    """path: of the file that `save` writes, if it writes one."""

    path: Path | None

    def save(self) -> None: ...

    def load(self) -> Sequence[torch.Tensor]:
        """Return what was saved, in memory that the next call overwrites."""


class Plain:
    """The same bytes, by one write and one read."""

    def __init__(self, folder: Path, sides: Sequence[torch.Tensor]) -> None:
        self.path: Path | None = folder / "plain"
        self._data = flat(sides)
        self._room = torch.zeros_like(self._data)

    def save(self) -> None:
        assert self.path is not None
        with self.path.open("wb", buffering=0) as file:
            assert file.write(self._data.numpy().data) == len(self._data)

    def load(self) -> Sequence[torch.Tensor]:
        assert self.path is not None
        with self.path.open("rb", buffering=0) as file:
            assert file.readinto(self._room.numpy().data) == len(self._room)
        return [self._room]


class Ours:
    """`KVFiles`, checksums included."""

    def __init__(self, folder: Path, sides: Sequence[torch.Tensor]) -> None:
        self._files, self._sides = KVFiles(folder, "benchmark"), sides
        self.path: Path | None = self._files._path(_NAME)

    def save(self) -> None:
        self._files.save(_NAME, self._sides)

    def load(self) -> Sequence[torch.Tensor]:
        return self._files.load(_NAME)


class Nixl:
    """NIXL's POSIX plugin, between registered memory and a file that is opened and registered each time."""

    def __init__(self, folder: Path, sides: Sequence[torch.Tensor]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise SystemExit(f"nixl needs its package: pip install nixl==1.5.1 ({error})") from error
        self.path: Path | None = folder / "nixl"
        self._agent = nixl_agent("stores", nixl_agent_config(backends=["POSIX"]))
        self._data = flat(sides)
        self._room = torch.zeros_like(self._data)
        for memory in (self._data, self._room):
            self._agent.register_memory(memory, backends=["POSIX"])

    def save(self) -> None:
        self._move("WRITE", self._data, os.O_WRONLY | os.O_CREAT)

    def load(self) -> Sequence[torch.Tensor]:
        self._move("READ", self._room, os.O_RDONLY)
        return [self._room]

    def _move(self, operation: str, memory: torch.Tensor, flags: int) -> None:
        assert self.path is not None
        agent, size = self._agent, len(memory)
        file = os.open(self.path, flags)
        registered = agent.register_memory([(0, size, file, "")], "FILE", backends=["POSIX"])
        there = agent.get_xfer_descs([(0, size, file)], "FILE")
        moving = agent.initialize_xfer(operation, agent.get_xfer_descs(memory), there, agent.name)
        state = agent.transfer(moving)
        while state == "PROC":
            state = agent.check_xfer_state(moving)
        assert state == "DONE", state
        agent.release_xfer_handle(moving)
        agent.deregister_memory(registered, backends=["POSIX"])
        os.close(file)


class Mooncake:
    """Mooncake Store's client, with a master and a process that holds the memory. Each save has a name of its
    own: what was loaded cannot be removed for some seconds."""

    path: Path | None = None

    def __init__(self, sides: Sequence[torch.Tensor], room: int, stack: ExitStack) -> None:
        master = shutil.which("mooncake_master")
        if master is None:
            raise SystemExit("mooncake needs its package: pip install mooncake-transfer-engine-non-cuda")
        running = subprocess.Popen([master, f"--rpc_port={_MASTER.split(':')[1]}"], stderr=subprocess.DEVNULL)
        stack.callback(running.kill)
        time.sleep(2)
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        holder = spawn.Process(target=hold, args=(room, ready), daemon=True)
        holder.start()
        stack.callback(holder.kill)
        if not ready.wait(60):
            raise SystemExit("mooncake: the process that holds the memory does not start")
        self._store, self._saved = client(0), 0
        self._data = flat(sides)
        self._room = torch.zeros_like(self._data)
        for memory in (self._data, self._room):
            done(self._store.register_buffer(memory.data_ptr(), len(memory)))

    def save(self) -> None:
        self._saved += 1
        done(self._store.put_from(f"group{self._saved}", self._data.data_ptr(), len(self._data)))

    def load(self) -> Sequence[torch.Tensor]:
        read = self._store.get_into(f"group{self._saved}", self._room.data_ptr(), len(self._room))
        done(read - len(self._room))
        return [self._room]


def client(room: int) -> Any:
    """A client of Mooncake Store that gives so many bytes of its memory."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise SystemExit(
            f"mooncake: {error}; pip install mooncake-transfer-engine-non-cuda==0.3.13.post1"
        ) from error
    store = MooncakeDistributedStore()
    done(store.setup("127.0.0.1", "P2PHANDSHAKE", room, 64 << 20, "tcp", "", _MASTER))
    return store


def hold(room: int, ready: Any) -> None:
    store = client(room)
    ready.set()
    while store is not None:
        time.sleep(60)


def done(code: int) -> None:
    if code:
        raise RuntimeError(f"mooncake failed: {code}")


def flat(sides: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([side.reshape(-1).view(torch.uint8) for side in sides])


def group(int8: bool) -> list[torch.Tensor]:
    """K/V of a group, drawn."""
    cache = PagedKVCache(range(_LAYERS), _KV_HEADS, _HEAD_DIM, GROUP_PAGES, torch.bfloat16, "cpu", int8=int8)
    for side in cache.sides:
        side.view(torch.uint8).random_(0, 255)
    return [*cache.sides]


def drop(path: Path) -> None:
    """Flush a file, and take it out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def turn(store: Store, data: torch.Tensor) -> list[float]:
    """Return how long a group takes to save, to load, and to load from the disk. Raises AssertionError where
    other bytes come back."""
    times = [milliseconds(store.save), milliseconds(store.load)]
    if store.path is not None:
        drop(store.path)
        times.append(milliseconds(store.load))
    assert torch.equal(flat(store.load()), data)
    if store.path is not None:
        store.path.unlink()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    kinds = ["plain", "kv_files", "nixl", "mooncake"]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    sides = group(given.int8)
    data = flat(sides)
    with ExitStack() as stack:
        make: dict[str, Callable[[], Store]] = {
            "plain": lambda: Plain(given.folder, sides),
            "kv_files": lambda: Ours(given.folder, sides),
            "nixl": lambda: Nixl(given.folder, sides),
            "mooncake": lambda: Mooncake(sides, 2 * given.turns * len(data), stack),
        }
        stores = {kind: make[kind]() for kind in given.only}
        for store in stores.values():
            turn(store, data)
        times: dict[str, list[list[float]]] = {kind: [] for kind in stores}
        for _ in range(given.turns):
            for kind, store in stores.items():
                times[kind].append(turn(store, data))
    print(
        f"{len(data) / 2**20:.1f} MiB, medians of {given.turns} in ms (least); load {os.getloadavg()[0]:.0f}"
    )
    for kind, all_times in times.items():
        cells = [f"{statistics.median(one):.0f} ({min(one):.0f})" for one in zip(*all_times, strict=True)]
        print(" | ".join([kind, *cells, *["–"] * (3 - len(cells))]))


if __name__ == "__main__":
    main()
