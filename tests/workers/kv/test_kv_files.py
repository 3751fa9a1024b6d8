"""Tests a store's folder to which others write, too: foreign files, and other workers at the same time."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from deltafront.workers.kv.kv_files import KVFiles
from deltafront.workers.kv.pages.store_tier import StoreError

SIDES = [torch.zeros(2, 3)]


def made(folder: Path, *names: bytes) -> KVFiles:
    files = KVFiles(folder, "a model")
    for name in names:
        files.save(name, SIDES)
    return files


def names_in(files: KVFiles) -> set[bytes]:
    return {name for name, _date in files.saved()}


def test_ignores_and_keeps_foreign_files_in_the_kv_store(tmp_path: Path) -> None:
    files = made(tmp_path, bytes(32))
    [ours] = files._folder.glob("*.safetensors")
    strange = ["notes.safetensors", f"{bytes(32).hex()}.safetensors"]
    strange += [f"._{ours.name}", f"copy of {ours.name}"]
    for name in strange:
        (files._folder / name).write_bytes(b"\x00\x05\x16\x07")
    (files._folder / f"{32 * 'ab'}.safetensors").mkdir()
    os.mkfifo(files._folder / f"{32 * 'cd'}.safetensors")
    (files._folder / f"{32 * 'ef'}.safetensors").write_bytes(ours.read_bytes())
    assert names_in(made(tmp_path)) == {bytes(32)}
    assert len(list(files._folder.iterdir())) == len(strange) + 4


def test_listing_kv_files_tolerates_files_that_vanish_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = made(tmp_path, *(bytes([n]) * 32 for n in range(4)))
    (files._folder / "unfinished.part").touch()
    listed, glob = [], Path.glob

    def removed_once_listed(folder: Path, pattern: str) -> list[Path]:
        listed.extend(found := sorted(glob(folder, pattern)))
        for path in found[:2]:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "glob", removed_once_listed)
    assert len(KVFiles(tmp_path, "a model").saved()) == 2 and len(listed) == 5


def test_skips_a_kv_file_that_vanishes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, name_in = made(tmp_path, bytes(32), bytes([1]) * 32), KVFiles._name_in

    def evicted(self: KVFiles, path: Path) -> bytes:
        name = name_in(self, path)
        if name == bytes(32):
            path.unlink()
        return name

    monkeypatch.setattr(KVFiles, "_name_in", evicted)
    assert names_in(files) == {bytes([1]) * 32}


def test_only_the_services_user_may_list_and_read_the_store(tmp_path: Path) -> None:
    store = tmp_path / "a" / "store"
    made(store, bytes(32))
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (store, *store.rglob("*"))}
    assert modes == {True: 0o700, False: 0o600}


def test_file_names_cannot_be_guessed_without_the_stores_secret(tmp_path: Path) -> None:
    """The same group has different names in two stores, and no name is a hash of known data."""
    name = bytes(range(32))
    one, other = (
        [path.name for path in made(tmp_path / which, name)._folder.glob("*.safetensors")] for which in "ab"
    )
    assert one != other
    guesses = (name.hex(), name[16:].hex(), hashlib.sha256(name).hexdigest())
    assert not any(guess in found for guess in guesses for found in (*one, *other))


def test_workers_starting_at_once_share_one_store_secret(tmp_path: Path) -> None:
    for turn in range(20):
        store, barrier = tmp_path / str(turn), threading.Barrier(8)
        found: list[bytes] = []

        def start(store: Path = store, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            found.append(KVFiles(store, "a model")._secret)  # noqa: B023  the threads end in this turn

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and len(set(found)) == 1
        assert [path.name for path in store.glob(".*")] == [".secret"]


def write_and_remove(folder: Path, seed: int, stop: threading.Event) -> None:
    files, names = KVFiles(folder, "a model"), [bytes([seed, n]) * 16 for n in range(8)]
    while not stop.is_set():
        for name in names:
            files.save(name, SIDES)
        for name in names:
            files.remove(name)


def test_worker_starts_while_others_save_to_and_evict_from_its_store(tmp_path: Path) -> None:
    made(tmp_path, bytes(32))
    stop = threading.Event()
    others = [threading.Thread(target=write_and_remove, args=(tmp_path, seed, stop)) for seed in (1, 2)]
    for other in others:
        other.start()
    try:
        for _ in range(200):
            assert bytes(32) in names_in(KVFiles(tmp_path, "a model"))
    finally:
        stop.set()
        for other in others:
            other.join()


def test_error_names_a_bad_store_secret_or_a_folder_it_cannot_create(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / ".secret").write_bytes(b"short")
    with pytest.raises(StoreError, match=rf"^decode\.store: {tmp_path}/\.secret is not a secret of 32 bytes"):
        made(tmp_path)
    with pytest.raises(StoreError, match=r"^decode\.store: .*/proc/none"):
        made(Path("/proc/none/store"))
