"""Files of batches over HTTP: uploads, their limits, and the storage under them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltafront.service import wiring
from deltafront.service.config import ConfigError, parse
from deltafront.service.door.batches import answers, catalog, lease, upload
from deltafront.service.door.batches.answers import Answered, BatchAnswers
from deltafront.service.door.batches.catalog import Catalog
from deltafront.service.door.batches.lease import DoorLease, LeaseLost
from deltafront.service.door.batches.records import UnknownFile
from deltafront.service.door.batches.routes import BatchOptions
from deltafront.service.door.batches.storage import Storage
from deltafront.service.errors import InvalidArgument
from deltafront.service.settings import DoorConfig

from ..inprocess import HANG_S, House, wait_until

CONTENT = bytes(range(256)) * 9000
"""More than two blocks of a download."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def address(house: House, place: Path, make_http: Callable[..., str]) -> str:
    options = BatchOptions(Storage(str(place)), 1 << 24, 1, "one", house.metrics.count_batch_lines)
    return make_http(house, batches=options)


@pytest.fixture(params=["", "memory://"])
def storage(request: pytest.FixtureRequest, place: Path) -> Iterator[Storage]:
    made = Storage(f"{request.param}{place}")
    yield made
    made.stop()


def put(api: openai.OpenAI, content: bytes = b"{}", name: str = "in.jsonl") -> Any:
    return api.files.create(file=(name, content), purpose="batch")


def form(address: str, data: dict[str, Any], file: bytes | None = b"{}") -> httpx.Response:
    files = None if file is None else {"file": ("in.jsonl", file)}
    return httpx.post(f"{address}/v1/files", data=data, files=files, timeout=HANG_S)


def test_file_comes_back_as_it_was_sent_until_it_is_deleted(api: openai.OpenAI, place: Path) -> None:
    file = put(api, CONTENT, "../../in.jsonl")
    assert (file.bytes, file.purpose, file.status) == (len(CONTENT), "batch", "processed")
    assert api.files.retrieve(file.id) == file and file.filename.endswith("in.jsonl")
    assert api.files.content(file.id).content == CONTENT
    assert [one.id for one in api.files.list(purpose="batch")] == [file.id]
    assert not list(api.files.list(purpose="batch_output"))
    assert api.files.delete(file.id).deleted
    for call in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file") as caught:
            call(file.id)
        assert caught.value.code == "file_not_found"
    assert not [path for path in place.rglob("*") if path.is_file()]


def test_files_are_listed_in_both_orders(api: openai.OpenAI) -> None:
    made = [put(api).id for _ in range(3)]
    assert [one.id for one in api.files.list(order="asc", limit=2)] == sorted(made)
    assert [one.id for one in api.files.list(limit=2)] == sorted(made)[::-1]
    with pytest.raises(openai.BadRequestError, match="limit: must be a whole number above 0"):
        api.files.list(limit=0)


@pytest.mark.parametrize(
    ("data", "file", "words"),
    [
        ({"purpose": "fine-tune"}, b"{}", "purpose: must be batch"),
        ({}, b"{}", "purpose: must be batch"),
        ({"purpose": "batch"}, None, "file: is missing"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, b"{}", "is not supported by this server"),
        ({"purpose": "b" * (1 << 17)}, b"{}", "the form is not read: Part exceeded maximum size"),
        ({str(number): "x" for number in range(9)}, b"{}", "the form is not read: Too many fields"),
    ],
)
def test_wrong_forms_are_refused(
    address: str, data: dict[str, Any], file: bytes | None, words: str, place: Path
) -> None:
    answer = form(address, data, file)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert not list(place.rglob("*.jsonl"))


@pytest.mark.parametrize("chunked", [False, True])
def test_file_that_is_too_large_is_refused(
    address: str, place: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr(upload, "FILE_BYTES", 1000)
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = [head, *[b"x" * 1000] * 200, b"\r\n--b--\r\n"]
    given: Any = iter(body) if chunked else b"".join(body)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    answer = httpx.post(f"{address}/v1/files", content=given, headers=kind, timeout=HANG_S)
    assert answer.status_code == 400 and answer.headers["connection"] == "close"
    assert "file: is larger than 1000 bytes" in answer.json()["error"]["message"]
    assert "file: is larger" in form(address, {"purpose": "batch"}, b"x" * 1001).json()["error"]["message"]
    assert not list(place.rglob("*.jsonl"))


def begun(address: str) -> socket.socket:
    """Begin an upload, and send no more of it."""
    host, _, port = address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), HANG_S)
    kind = "content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000"
    connection.sendall(f"POST /v1/files HTTP/1.1\r\nhost: a\r\n{kind}\r\n\r\n--b\r\n".encode())
    return connection


def test_silent_upload_ends_with_408(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_IDLE_S", 0.05)
    with begun(address) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_uploads_at_once_are_bounded(
    address: str, monkeypatch: pytest.MonkeyPatch, api: openai.OpenAI
) -> None:
    monkeypatch.setattr(upload, "_UPLOADS", 1)

    def refused() -> bool:
        return form(address, {"purpose": "batch"}).status_code == 429

    with begun(address):
        wait_until(refused, "a second upload is received")
    wait_until(lambda: not refused(), "the place of a client that left is not free")


def test_caller_has_a_bounded_number_of_files(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "FILES", 2)
    file, _ = put(api), put(api)
    with pytest.raises(openai.BadRequestError, match="at most 2 files; delete some"):
        put(api)
    api.files.delete(file.id)
    put(api)


def test_caller_has_at_most_half_of_the_room(storage: Storage) -> None:
    files = Catalog(storage, 100_000)
    assert files.room("") == 100_000 and files.room("a") == 50_000
    first = files.add_file("a", "x", 50_000, [b"x" * 50_000])
    with pytest.raises(InvalidArgument, match="this caller may add 0: delete files"):
        files.add_file("a", "x", 1, [b"x"])
    assert 24_000 < files.room("b") < 25_000
    files.delete_file("a", first.id)
    assert files.room("a") == 50_000


def test_storage_has_whole_files_and_bounded_names(storage: Storage) -> None:
    files = Catalog(storage, 1 << 20)

    def broken() -> Iterator[bytes]:
        yield b"a"
        raise OSError("the disk is full")

    file = files.add_file("a", "n" * 999, 3, [b"abc"])
    assert len(file.filename) == 255 and files.file("a", file.id) == file
    with pytest.raises(OSError, match="the disk is full"):
        files.add_file("a", "x", 1, broken())
    found, more = files.files("a", "", 9, True, "")
    assert found == [file] and not more
    for wrong in ("", "../../lease", "file-" + "z" * 32, "batch_" + file.id.removeprefix("file-")):
        with pytest.raises(UnknownFile):
            files.file("a", wrong)
    assert storage.names("nowhere") == []
    storage.delete("nowhere")


def test_each_lines_first_answer_is_read_from_many_parts(storage: Storage) -> None:
    parts = BatchAnswers(Catalog(storage, 1 << 20), "ann", "batch_1", "one")
    for number in range(2 * answers._AT_ONCE + 1):
        parts.add([Answered(number, True, b"{}\n"), Answered(number + 1, False, b'{"a": "\xe2\x80\xa8"}\n')])
    found = list(parts.read())
    assert [answer.number for answer in found] == list(range(2 * answers._AT_ONCE + 2))
    assert found[0] == Answered(0, True, b"{}\n")
    assert {answer.line for answer in found[1:]} == {b'{"a": "\xe2\x80\xa8"}\n'}


def test_place_is_a_folder_or_a_url_that_can_be_used(place: Path) -> None:
    def batches(given: str) -> DoorConfig:
        full = {"page_selection": "full"}
        content = {"model": {"path": "m"}, "decode": full, "door": {"batches": given}}
        return parse(content, folder=place).door

    assert batches("here").batches == str(place / "here")
    assert batches("s3://bucket/here").batches == "s3://bucket/here"
    assert wiring.batch_options(batches(""), "one", print) is None
    with pytest.raises(ConfigError, match=r"door.batches = 'nowhere://x': Protocol not known: nowhere"):
        wiring.batch_options(batches("nowhere://x"), "one", print)


class Doors:
    """Two doors on one storage, and the time."""

    def __init__(self, storage: Storage) -> None:
        self.now = 0.0
        self.one, self.two = (DoorLease(storage, name, lambda: self.now) for name in ("one", "two"))

    def turn(self, *doors: DoorLease) -> list[bool]:
        self.now += lease.TURN_S
        return [door.hold() for door in doors]


def test_one_door_holds_the_lease(storage: Storage) -> None:
    doors = Doors(storage)
    turns = [doors.turn(doors.one, doors.two) for _ in range(40)]
    assert turns == [[False, False], *[[True, False]] * 39]
    doors.one.check()
    with pytest.raises(LeaseLost):
        doors.two.check()


def test_last_of_two_doors_that_claim_at_once_has_the_lease(storage: Storage) -> None:
    doors = Doors(storage)
    doors.one.hold()
    storage.delete("lease")
    doors.two.hold()  # it saw no lease, either
    assert [doors.turn(doors.one, doors.two) for _ in range(2)] == [[False, True]] * 2


def test_dead_doors_lease_passes_on_after_half_a_minute(storage: Storage) -> None:
    doors = Doors(storage)
    doors.turn(doors.one)
    assert doors.turn(doors.one) == [True]
    began = doors.now
    turns = list(
        itertools.takewhile(lambda held: held == [False], (doors.turn(doors.two) for _ in range(99)))
    )
    assert 30.0 <= doors.now - began <= 40.0 and turns
    with pytest.raises(LeaseLost):
        doors.one.check()
    assert doors.turn(doors.one, doors.two) == [False, True], "the first one wakes up"


def test_door_that_stops_gives_the_lease_back(storage: Storage) -> None:
    doors = Doors(storage)
    doors.turn(doors.one)
    doors.turn(doors.one, doors.two)
    doors.two.release()
    doors.one.check()
    doors.one.release()
    with pytest.raises(LeaseLost):
        doors.one.check()
    assert [doors.turn(doors.two) for _ in range(2)] == [[False], [True]]
