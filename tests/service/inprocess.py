"""A whole door in this process, with a real gRPC server, and fake workers whose connections a test can
cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deltafront.service import wiring
from deltafront.service.config import ServiceConfig, parse
from deltafront.service.door.grpc_door import FrontDoor
from deltafront.service.door.registration import Entrance, add_deltafront_to_server, add_health_to_server
from deltafront.service.door.tls import Gate
from deltafront.service.errors import WorkerFailed, WorkerHandoffFailed, WorkerLost
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.metrics import Metrics
from deltafront.service.request.answers import RequestEvent
from deltafront.service.request.calls import PrefillRequest
from deltafront.service.request.handler import RequestHandler
from deltafront.service.tracing import Tracing
from deltafront.workers.messages.requests import DecodeFailed, PrefillFailed
from deltafront.workers.messages.stages import HandoffFailed

from .directory import LocalDirectory
from .fakes import FakeDecode, FakeGroup

T = TypeVar("T")
HANG_S = 60.0
"""The longest wait for an event, only to keep a failing test from hanging."""
VOCABULARY = 258
TEMPLATE = (
    "{% if messages[0].role != 'system' %}[s:be nice]{% endif %}"
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[a:{{ mood }}{% endif %}"
)


def write_model(directory: Path, positions: int = 8192) -> Path:
    """Write a model directory with an empty weights file and `write_tokenizer`'s tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per byte (id = byte), BOS 256, EOS 257 and a chat template."""
    alphabet = _byte_characters()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))


def _byte_characters() -> list[str]:
    """Return GPT-2's printable characters for the 256 bytes, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def settings(model: Path, **door: Any) -> ServiceConfig:
    quick = {"worker_wait_s": HANG_S, "refresh_s": 0.05, "renew_s": 0.1, "default_method": "dense"}
    content = {
        "model": {"path": str(model)},
        "decode": {"page_selection": "full"},
        "door": {**quick, **door},
    }
    return parse(content)


def wait_until(true: Callable[[], object], otherwise: str, every_s: float = 0.01) -> None:
    until = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < until, otherwise
        time.sleep(every_s)


async def edge(
    requests: RequestHandler, read: Callable[[], PrefillRequest], size: int = 0
) -> AsyncGenerator[RequestEvent, None]:
    """Run a request like a door's protocol, but without a protocol."""
    async with requests.accept("edge", [], size=size) as accepted:
        request = read()
        stream = requests.run(accepted, request)
        del request
        async with contextlib.aclosing(stream):
            async for event in stream:
                yield event


class Cut:
    """A worker whose connection a test can cut. Then every call raises WorkerLost."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.cut = False
        self.cut_after = -1
        """The number of events after which the connection is cut; -1: never."""

    @property
    def name(self) -> str:
        return str(self.worker.name)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method in ("prefill", "generate"):
            return lambda *arguments: self._stream(method, *arguments)
        return lambda *arguments: self._call(method, *arguments)

    def _check(self) -> None:
        if self.cut:
            raise WorkerLost(self.name, f"{self.name} died")

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._check()
        try:
            return await getattr(self.worker, method)(*arguments)
        except DecodeFailed as error:
            raise WorkerFailed(self.name, str(error)) from None

    async def _stream(self, method: str, *arguments: Any) -> AsyncIterator[Any]:
        self._check()
        try:
            async for event in getattr(self.worker, method)(*arguments):
                if self.cut_after == 0:
                    self.cut = True
                self.cut_after -= 1
                self._check()
                yield event
                self._check()
        except (PrefillFailed, DecodeFailed) as error:
            kind = WorkerHandoffFailed if isinstance(error, HandoffFailed) else WorkerFailed
            raise kind(self.name, str(error)) from None


@dataclass
class House:
    """The door, its workers and its address."""

    door: FrontDoor
    fleet: Fleet
    directory: LocalDirectory
    metrics: Metrics
    address: str
    loop: Loop
    losses: list[tuple[int, grpc.StatusCode]]
    """The next streams to break: the number of events, and a status that does not come from the door."""
    beside: list[House]
    """The other doors of the service."""
    config: ServiceConfig
    gate: Gate | None
    entrance: Entrance

    @property
    def group(self) -> FakeGroup:
        worker: FakeGroup = self.directory.groups[-1].worker  # type: ignore[attr-defined]
        return worker

    @property
    def decode(self) -> FakeDecode:
        worker: FakeDecode = self.directory.workers[-1].worker  # type: ignore[attr-defined]
        return worker

    def cut(self, kind: str) -> Cut:
        return (self.directory.groups if kind == "group" else self.directory.workers)[-1]  # type: ignore[return-value]

    def add_group(self, name: str) -> FakeGroup:
        group = FakeGroup(name, self.deliver)
        self.directory.groups.append(Cut(group))  # type: ignore[arg-type]
        return group

    def add_decode(self, name: str) -> FakeDecode:
        decode = FakeDecode(name)
        decode.grammars = self.door._requests._resources.grammars
        self.directory.workers.append(Cut(decode))  # type: ignore[arg-type]
        return decode

    async def deliver(self, worker: str, request_id: str, ids: bytes, attempt: int) -> None:
        for link in self.directory.workers:
            if link.name == worker:
                await link.worker.deliver(request_id, ids, attempt)  # type: ignore[attr-defined]

    def pages_used(self) -> int:
        decode = sum(link.worker.used() for link in self.directory.workers)  # type: ignore[attr-defined]
        return decode + sum(sum(link.worker._open.values()) for link in self.directory.groups)  # type: ignore[attr-defined]


class Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.name = self._thread.name

    def run(self, work: Coroutine[Any, Any, T], timeout: float = HANG_S) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(timeout)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(HANG_S)
        self.loop.close()


class _Servicer:
    """Calls methods like Serve: by name, with the context as grpc_context."""

    def __init__(self, house: House) -> None:
        self._house = house

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._house.door, name)
        if name in ("Prefill", "Generate", "Watch"):

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                left, code = self._house.losses.pop(0) if self._house.losses else (-1, None)
                async with contextlib.aclosing(method(request, grpc_context=context)) as messages:
                    async for message in messages:
                        if left == 0:
                            context.set_code(code)
                            context.set_details("The actor died unexpectedly")
                            return
                        yield message
                        left -= 1

            return stream

        async def unary(request: Any, context: Any) -> Any:
            return await method(request, grpc_context=context)

        return unary


async def open_house(
    config: ServiceConfig,
    metrics: Metrics,
    loop: Loop,
    others: Sequence[House] = (),
    traced: Tracing | None = None,
) -> tuple[House, grpc.aio.Server]:
    """Open a door. others: doors of the same service that are already open. All doors know each other."""
    directory = others[0].directory if others else LocalDirectory([], [])
    fleet = Fleet(directory, wiring.observer(metrics), config.door.refresh_s, config.door.renew_s)
    beside = list(others)

    async def cancel_at_other_doors(owner: str, request_id: str) -> int:
        return sum(other.door._requests.cancel_here(owner, request_id) for other in beside)

    name = f"door{len(others)}"
    gate = Gate(config.door.tls_port) if config.door.tls_certificate else None
    handler = wiring.request_handler(
        config,
        fleet,
        metrics,
        metrics_address="nowhere:1",
        door_id=name,
        cancel_at_other_doors=cancel_at_other_doors,
        gate=gate,
        tracing=traced,
    )
    door = FrontDoor(handler)
    entrance = Entrance(config.door.max_message_bytes, door)
    house = House(door, fleet, directory, metrics, "", loop, [], beside, config, gate, entrance)
    for other in others:
        other.beside.append(house)
    if not others:
        house.add_group("prefill:g0")
        house.add_decode("decode:d0")
    fleet.start()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", config.door.max_message_bytes)])
    servicer = _Servicer(house)
    add_deltafront_to_server(servicer, server, entrance)
    add_health_to_server(servicer, server, entrance)
    house.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await fleet.wait_until_ready(HANG_S)
    return house, server
