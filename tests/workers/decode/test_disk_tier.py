"""Tests KV that a decode worker saves on disk: later workers give the same answers from it, and prefill again
if a file is gone, changed or of another model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.workers.kv.kv_files import KVFiles
from deltafront.workers.kv.pages.store_tier import GROUP_PAGES, StoreError
from deltafront.workers.messages.requests import (
    DecodeFailed,
    RefusalReason,
    Refused,
    Reservation,
)

from ..conftest import Bench
from ..keys import key_of
from .test_decode_engine import NEW, expected, prompt
from .test_host_cache import copied, slots_used
from .test_remembered import Expected, found, go_on, read

__all__ = ["expected"]
GROUP = GROUP_PAGES * 16
DOCUMENT = prompt(2 * GROUP + 40)


async def saved(run: Bench) -> None:
    store = run.engine._tiers.store
    assert store is not None
    await copied(run)
    while store.busy:
        await asyncio.sleep(0.001)


_IN_HEADER = {
    "another name": (b'"1":{', b'"7":{'),
    "another type": (b'"dtype":"F32"', b'"dtype":"I32"'),
    "another shape": (b'"shape":[6,16,', b'"shape":[16,6,'),
}
"""Changes to a file's header after which it is still a valid safetensors file."""


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def started(bench: Any, tmp_path: Path) -> Any:
    async def start(**more: Any) -> Bench:
        given = {"host_cache_gib": 0.05, "store": str(tmp_path), **more}
        run: Bench = await bench(**given)
        return run

    return start


async def test_restarted_decode_worker_answers_from_kv_on_disk(started: Any, expected: Expected) -> None:
    first = await started()
    await read(first, "first", DOCUMENT)
    await saved(first)
    assert len(first.engine._tiers.store) == 2
    second = await started()
    assert await found(second, DOCUMENT) == 2 * GROUP
    reservation = {"key": key_of(DOCUMENT), "prefix_tokens": 2 * GROUP, "reads_rest": True}
    reserved = await second.reserve("asked", 40, NEW, **reservation)
    assert (reserved.held_tokens, reserved.host_tokens, reserved.disk_tokens) == (2 * GROUP, 0, 2 * GROUP)
    await second.engine.cancel("asked")
    assert (await go_on(second, "again", DOCUMENT, 2 * GROUP)).ids == expected(list(DOCUMENT))
    third = await started()
    told = await third.engine.find_prefix(key_of(DOCUMENT))
    assert (told.tokens, told.disk_tokens, told.disk_s) == (2 * GROUP, 2 * GROUP, 0.0), "no rate is known"
    await go_on(third, "first", DOCUMENT[: GROUP + 20], GROUP)
    told = await third.engine.find_prefix(key_of(DOCUMENT))
    assert (told.tokens, told.disk_tokens) == (2 * GROUP, GROUP - 16) and told.disk_s > 0
    longer = [*DOCUMENT[: GROUP + 100], *prompt(60, seed=5)]
    assert await found(second, longer) == (GROUP + 100) // 16 * 16
    await saved(second)
    assert (second.used, slots_used(second)) == (0, 0)


async def test_disk_completes_a_prefix_that_is_partly_in_host_memory(
    started: Any, expected: Expected
) -> None:
    first = await started()
    await read(first, "first", DOCUMENT)
    await saved(first)
    second = await started()
    await read(second, "half", DOCUMENT[: GROUP + 80])
    await saved(second)
    assert await found(second, DOCUMENT) == 2 * GROUP
    assert (await go_on(second, "again", DOCUMENT, 2 * GROUP)).ids == expected(list(DOCUMENT))


@pytest.mark.parametrize("gives_up", ["cancels", "goes"])
async def test_disconnect_during_a_disk_load_frees_everything(started: Any, gives_up: str) -> None:
    """The request has no pages yet, and gets none. The prompt's beginning is in host memory, the rest only on
    disk."""
    first = await started()
    await read(first, "first", DOCUMENT)
    await saved(first)
    run = await started()
    await read(run, "half", DOCUMENT[: GROUP + 80])
    await saved(run)
    run.engine._manager.pool.clear_prefix_cache()
    store, began, may_go_on = run.engine._tiers.store, asyncio.Event(), asyncio.Event()
    stored = store._stored

    async def slowly(work: str, name: bytes, slots: Sequence[int], state: int) -> None:
        began.set()
        await may_go_on.wait()
        await stored(work, name, slots, state)

    store._stored = slowly
    given = {"key": key_of(DOCUMENT), "prefix_tokens": 2 * GROUP, "reads_rest": True, "owner": "me"}
    reservation = Reservation(request_id="asked", new_tokens=40, max_tokens=NEW, **given)
    reserving = asyncio.create_task(run.engine.reserve(reservation))
    await began.wait()
    if gives_up == "goes":
        reserving.cancel()
    else:
        await run.engine.cancel("asked")
    may_go_on.set()
    with pytest.raises((DecodeFailed, asyncio.CancelledError)):
        await reserving
    while len(run.engine._tiers.under_way):
        await asyncio.sleep(0.001)
    assert run.engine._requests.find("asked") is None
    assert (run.used, slots_used(run)) == (0, 0)


async def refused(run: Bench) -> Refused:
    given = {"key": key_of(DOCUMENT), "prefix_tokens": 2 * GROUP, "reads_rest": True, "owner": "me"}
    answer = await run.engine.reserve(Reservation(request_id="asked", new_tokens=40, max_tokens=NEW, **given))
    assert isinstance(answer, Refused)
    return answer


@pytest.mark.parametrize("harm", ["gone", "cut short", "changed", "no file of tensors", *_IN_HEADER])
async def test_altered_kv_file_is_a_cache_miss(
    started: Any, tmp_path: Path, expected: Expected, harm: str
) -> None:
    first = await started()
    await read(first, "first", DOCUMENT)
    await saved(first)
    second = await started()
    path = files(tmp_path)[0]
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "cut short":
        path.write_bytes(content[:-100])
    elif harm == "changed":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif harm in _IN_HEADER:
        before, after = _IN_HEADER[harm]
        assert before in content[:2000]
        path.write_bytes(content.replace(before, after, 1))
    else:
        path.write_bytes(b"nothing")
    assert (await refused(second)).reason is RefusalReason.NO_PREFIX
    assert second.engine._tiers.store.lost == 1 and not path.exists()
    assert (second.used, slots_used(second)) == (0, 0)
    assert await found(second, DOCUMENT) in (0, GROUP)
    assert (await read(second, "anew", DOCUMENT)).ids == expected(list(DOCUMENT))


async def test_retained_prompt_stays_on_disk_for_other_workers(started: Any, tmp_path: Path) -> None:
    run = await started()
    run.engine._tiers.store._room = 2
    await read(run, "0", prompt(GROUP + 20, seed=0), retain_s=1000.0)
    for seed in (1, 2):
        await read(run, f"{seed}", prompt(GROUP + 20, seed=seed))
        await saved(run)
    assert len(files(tmp_path)) == 2 * (len(run.engine._ranks) + 1), "a file of each rank"
    fresh = await started()
    fresh.engine._tiers.store._room = 2
    assert [await found(fresh, prompt(GROUP + 20, seed=seed)) for seed in range(3)] == [GROUP, 0, GROUP]
    await read(fresh, "3", prompt(GROUP + 20, seed=3))
    await saved(fresh)
    assert [await found(fresh, prompt(GROUP + 20, seed=seed)) for seed in (0, 2)] == [GROUP, 0]


async def test_full_disk_of_the_kv_store_does_not_fail_requests(
    started: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await started()

    def full(_self: KVFiles, _name: bytes, _sides: Sequence[torch.Tensor]) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(KVFiles, "save", full)
    assert (await read(run, "first", DOCUMENT)).ids == expected(list(DOCUMENT))
    await saved(run)
    assert (len(run.engine._tiers.store), run.engine._tiers.store.lost, run.engine.fault) == (0, 2, "")


async def test_failed_deletion_on_disk_does_not_fail_requests(
    started: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await started()
    run.engine._tiers.store._room = 1

    def read_only(_self: Path, missing_ok: bool = False) -> None:
        raise PermissionError("a read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    assert (await read(run, "first", DOCUMENT)).ids == expected(list(DOCUMENT))
    await saved(run)
    assert (len(run.engine._tiers.store), run.engine.fault) == (1, "")


def test_does_not_use_files_of_another_kv_format(tmp_path: Path) -> None:
    ours, theirs = KVFiles(tmp_path, "a model"), KVFiles(tmp_path, "another")
    name, sides = bytes(32), [torch.randn(2, 3), torch.arange(6, dtype=torch.uint8)]
    ours.save(name, sides)
    assert all(map(torch.equal, ours.load(name), sides))
    assert ([name for name, _ in ours.saved()], theirs.saved()) == ([name], [])
    theirs._path(name).write_bytes(ours._path(name).read_bytes())
    with pytest.raises(StoreError, match="of other KV: a model"):
        theirs.load(name)
    ours.remove(name)
    with pytest.raises(StoreError, match="No such file"):
        ours.load(name)
