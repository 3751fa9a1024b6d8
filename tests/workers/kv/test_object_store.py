"""Tests the KV hand-off through host memory, without Ray: bytes, dtypes, refusals and late errors.

`test_prefill_group.py` tests the object store itself. Here a stand-in for Ray counts unanswered messages.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.workers.kv.handoff.object_store import ObjectStoreOutbox, pull
from deltafront.workers.kv.handoff.outbox import Delivery
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError
from deltafront.workers.kv.handoff.stream import MessageSender, MessageStream
from deltafront.workers.kv.host_copies import HostCopies
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement


class Box:
    """An outbox that keeps all messages, and fails those of the request `refuse`."""

    def __init__(self) -> None:
        self.announced: list[KVAnnouncement] = []
        self.sent_logits: list[FirstLogits] = []
        self.refuse = ""

    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        if announcement.request_id == self.refuse:
            delivery.fail(f"{announcement.request_id} was not taken")
        else:
            self.announced.append(announcement)

    def send_logits(self, delivery: Delivery, message: FirstLogits) -> None:
        self.sent_logits.append(message)

    def check(self, delivery: Delivery) -> None:
        if delivery.failure:
            raise HandoffError(delivery.failure)

    def unanswered(self, delivery: Delivery) -> bool:
        return False


def sender_to(box: Box, background: bool = False) -> MessageSender:
    return MessageSender(HostCopies("cpu"), box, background=background)


def stream_of(sender: MessageSender, name: str = "r", attempt: int = 0) -> MessageStream:
    return sender.open(Destination(request_id=name, decode_worker="decode:x", attempt=attempt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_kv_sent_through_the_object_store_arrives_unchanged(dtype: torch.dtype) -> None:
    box = Box()
    stream = stream_of(sender_to(box), attempt=2)
    kv_TJD = torch.randn(37, 6, 8).to(dtype)
    k, v = kv_TJD[:, :3], kv_TJD[:, 3:]
    assert stream.put(4, 128, k, v) == 2 * 37 * 3 * 8 * dtype.itemsize
    stream.end_chunk()()
    (announced,) = box.announced
    assert (announced.request_id, announced.layer, announced.start, announced.tokens) == ("r", 4, 128, 37)
    assert announced.attempt == 2
    ((got_k, got_v),) = await pull(announced, 3, 8, dtype)
    assert got_k.dtype is dtype
    assert torch.equal(got_k, k) and torch.equal(got_v, v)


@pytest.mark.parametrize("background", [False, True])
def test_sends_small_layers_in_one_object_and_large_ones_alone(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is sent when it is full, when the next layer belongs to another chunk, and at the chunk's
    end."""
    layer_bytes = 2 * 2 * 3 * 8 * 4
    monkeypatch.setattr(HostCopies, "message_bytes", 3 * layer_bytes)
    box = Box()
    sender = sender_to(box, background)
    streams = {name: stream_of(sender, name) for name in "rs"}
    made = {}

    def put(name: str, layer: int, start: int) -> None:
        made[name, start, layer] = torch.randn(2, 2, 3, 8)
        streams[name].put(layer, start, *made[name, start, layer])

    for layer in range(4, 9):
        put("r", layer, 0)
    put("r", 4, 2)
    streams["r"].end_chunk()()
    put("s", 5, 2)
    streams["s"].end_chunk()()
    found = [(a.request_id, a.start, a.layer, a.layers) for a in box.announced]
    assert found == [("r", 0, 4, 3), ("r", 0, 7, 2), ("r", 2, 4, 1), ("s", 2, 5, 1)]
    for a in box.announced:
        for n, (k, v) in enumerate(asyncio.run(pull(a, 3, 8, torch.float32))):
            assert torch.equal(torch.stack((k, v)), made[a.request_id, a.start, a.layer + n])
    monkeypatch.setattr(HostCopies, "message_bytes", layer_bytes)
    box.announced.clear()
    streams["r"] = stream_of(sender)
    for layer in range(3):
        put("r", layer, 4)
    if background:
        streams["r"].end_chunk()()
    assert [(a.layer, a.layers) for a in box.announced] == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("background", [False, True])
def test_closed_request_sends_no_more_kv(background: bool) -> None:
    box = Box()
    sender = sender_to(box, background)
    kv = torch.zeros(2, 3, 8)
    gone, stays = stream_of(sender, "gone"), stream_of(sender, "r")
    gone.put(0, 0, kv, kv)
    gone.close()
    gone.end_chunk()()
    stays.put(0, 0, kv, kv)
    stays.end_chunk()()
    assert [a.request_id for a in box.announced] == ["r"]


async def test_sends_logits_as_float32() -> None:
    box = Box()
    logits_V = torch.randn(50)
    stream_of(sender_to(box), attempt=2).put_logits(logits_V)
    assert box.sent_logits[0].logits.dtype == np.float32 and box.sent_logits[0].attempt == 2
    assert np.array_equal(box.sent_logits[0].logits, logits_V.numpy())


async def test_awaits_an_object_ref_and_reports_its_loss() -> None:
    async def arrives() -> Any:
        return np.zeros((2, 3, 8), np.float32), np.ones((2, 3, 8), np.float32)

    async def lost() -> Any:
        raise RuntimeError("the owner died\nand a traceback")

    ((_, v),) = await pull(
        KVAnnouncement(request_id="r", layer=0, start=0, tokens=2, payload=arrives()), 3, 8, torch.float32
    )
    assert bool((v == 1).all())
    with pytest.raises(HandoffError, match=r"KV of r, layer 0 at 0 is lost: RuntimeError: the owner died$"):
        await pull(
            KVAnnouncement(request_id="r", layer=0, start=0, tokens=2, payload=lost()), 3, 8, torch.float32
        )


async def test_accepts_read_only_memory_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = np.zeros((2, 3, 8), np.float32)
    array.flags.writeable = False
    ((k, _),) = await pull(
        KVAnnouncement(request_id="r", layer=0, start=0, tokens=2, payload=(array, array)),
        3,
        8,
        torch.float32,
    )
    assert k.data_ptr() == array.ctypes.data, "no copy"
    assert not list(recwarn)


WRONG: dict[str, Any] = {
    "tokens": (np.zeros((3, 3, 8), np.float32),) * 2,
    "heads": (np.zeros((2, 2, 8), np.float32),) * 2,
    "head dimension": (np.zeros((2, 3, 16), np.float32),) * 2,
    "dtype": (np.zeros((2, 3, 8), np.uint16),) * 2,
    "one array": (np.zeros((2, 3, 8), np.float32),),
    "no arrays": "abc",
    "only k is right": (np.zeros((2, 3, 8), np.float32), None),
}


@pytest.mark.parametrize("case", WRONG)
async def test_refuses_a_malformed_kv_payload(case: str) -> None:
    with pytest.raises(HandoffError, match="KV of r, layer 1 at 16"):
        await pull(
            KVAnnouncement(request_id="r", layer=1, start=16, tokens=2, payload=WRONG[case]),
            3,
            8,
            torch.float32,
        )


def test_sender_refuses_tensors_that_are_not_kv() -> None:
    stream = stream_of(sender_to(Box()))
    good = torch.zeros(2, 3, 8)
    for k, v in ((good, good[:1]), (good[0], good[0]), (good.double(), good.double())):
        with pytest.raises(HandoffError, match="cannot hand over"):
            stream.put(0, 0, k, v)


@pytest.mark.parametrize("background", [False, True])
def test_refused_announcement_fails_the_end_of_its_chunk(background: bool) -> None:
    box = Box()
    box.refuse = "r"
    sender = sender_to(box, background)
    kv = torch.zeros(2, 3, 8)
    streams = {name: stream_of(sender, name) for name in ("r", "other")}
    for stream in streams.values():
        stream.put(0, 0, kv, kv)
    streams["other"].end_chunk()()
    with pytest.raises(HandoffError, match="r was not taken"):
        streams["r"].end_chunk()()


def test_slow_outbox_delays_a_chunks_report_but_not_the_stage() -> None:
    let_go = threading.Event()

    class Slow(Box):
        def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
            assert let_go.wait(60)
            super().send_kv(delivery, announcement)

    box = Slow()
    sender = sender_to(box, background=True)
    kv = torch.zeros(2, 3, 8)
    streams = {name: stream_of(sender, name) for name in "rs"}
    sent = []
    for name, start in (("r", 0), ("r", 2), ("s", 0)):  # would hang if the stage waited
        streams[name].put(0, start, kv, kv)
        sent.append(streams[name].end_chunk())
    assert not box.announced
    threading.Timer(0.05, let_go.set).start()
    sent[0]()
    assert let_go.is_set() and box.announced[0].start == 0
    streams["r"].put_logits(torch.zeros(5))
    sent[1]()
    sent[2]()
    assert sorted((a.request_id, a.start) for a in box.announced) == [("r", 0), ("r", 2), ("s", 0)]
    assert len(box.sent_logits) == 1


def test_refused_kv_fails_only_its_own_request() -> None:
    box = Box()
    box.refuse = "r"
    sender = sender_to(box, background=True)
    kv = torch.zeros(2, 3, 8)
    streams = {name: stream_of(sender, name) for name in ("r", "other")}
    sent = {}
    for chunk in range(2):
        for name, stream in streams.items():
            stream.put(0, 2 * chunk, kv, kv)
            sent[name, chunk] = stream.end_chunk()
    for chunk in range(2):
        sent["other", chunk]()
        with pytest.raises(HandoffError, match="r was not taken"):
            sent["r", chunk]()
    for stream in streams.values():
        assert stream.close(), "host copies are no pages"


class FakeRay:
    """The Ray calls that ActorOutbox makes. Replies are answered when `answered` names them, or when they are
    waited for."""

    def __init__(self) -> None:
        self.answered: set[int] = set()
        self.errors: dict[int, Exception] = {}
        self.sent: list[Any] = []
        self.unanswered_peak = 0

    def put(self, value: Any) -> Any:
        return ("reference", value)

    def get_actor(self, name: str, namespace: str) -> Any:
        if name == "decode:gone":
            raise ValueError(f"no actor {name}")
        return self

    @property
    def announce(self) -> Any:
        return self

    first_logits = announce

    def remote(self, message: Any) -> int:
        self.sent.append(message)
        number = len(self.sent) - 1
        self.unanswered_peak = max(self.unanswered_peak, number + 1 - len(self.answered))
        return number

    def wait(self, replies: list[int], num_returns: int, timeout: float, fetch_local: bool) -> Any:
        if timeout > 0:
            self.answered |= {*replies}
        return [r for r in replies if r in self.answered], [r for r in replies if r not in self.answered]

    def get(self, reply: int, timeout: float) -> None:
        if reply not in self.answered:
            raise TimeoutError("no answer")
        if reply in self.errors:
            raise self.errors[reply]


def outbox_on(fake: FakeRay, max_bytes: int) -> ObjectStoreOutbox:
    outbox = ObjectStoreOutbox(max_bytes, 60.0)
    outbox._ray = fake
    return outbox


def announcement(request_id: str, floats: int = 256) -> KVAnnouncement:
    array = np.zeros((1, 1, floats), np.float32)
    return KVAnnouncement(request_id=request_id, layer=0, start=0, tokens=1, payload=(array, array))


def test_outbox_waits_while_too_many_bytes_are_unacknowledged() -> None:
    fake = FakeRay()
    outbox, r = outbox_on(fake, max_bytes=10 * 2048), Delivery("decode:x")
    for _ in range(50):
        outbox.send_kv(r, announcement("r"))
    assert fake.unanswered_peak <= 11
    assert all(message.payload[0] == "reference" for message in fake.sent)
    outbox.send_kv(r, announcement("r", floats=100_000))
    outbox.check(r)


def test_failed_acknowledgement_fails_only_its_own_request_once() -> None:
    fake = FakeRay()
    outbox = outbox_on(fake, max_bytes=1 << 20)
    a, b = Delivery("decode:x"), Delivery("decode:x")
    outbox.send_kv(a, announcement("a"))
    outbox.send_kv(b, announcement("b"))
    outbox.check(a)
    fake.errors[0] = RuntimeError("page table too short\ntraceback")
    fake.answered |= {0, 1}
    outbox.check(b)
    with pytest.raises(HandoffError, match=r"decode:x did not take KV: RuntimeError: page table too short$"):
        outbox.check(a)
    outbox.send_kv(a, announcement("a"))
    assert len(fake.sent) == 2, "nothing more is sent for a lost request"


def test_full_object_store_fails_only_the_request_that_filled_it() -> None:
    fake = FakeRay()
    outbox = outbox_on(fake, max_bytes=1 << 20)
    a, b = Delivery("decode:x"), Delivery("decode:x")
    put = fake.put

    def full(_value: Any) -> Any:
        raise MemoryError("no room for 4096 bytes\ntraceback")

    fake.put = full  # type: ignore[method-assign]
    outbox.send_kv(a, announcement("a"))
    with pytest.raises(HandoffError, match=r"the object store did not take KV: MemoryError: no room .*s$"):
        outbox.check(a)
    fake.put = put  # type: ignore[method-assign]
    outbox.send_kv(b, announcement("b"))
    outbox.check(b)
    assert [message.request_id for message in fake.sent] == ["b"]


def test_reports_an_unknown_decode_worker() -> None:
    outbox, a = outbox_on(FakeRay(), max_bytes=1 << 20), Delivery("decode:gone")
    outbox.send_kv(a, announcement("a"))
    with pytest.raises(HandoffError, match="decode:gone"):
        outbox.check(a)


def test_slow_transfer_does_not_delay_others() -> None:
    """A slow object does not delay the next transfer."""

    async def run() -> list[str]:
        order: list[str] = []
        array = np.zeros((1, 1, 1), np.float32)
        fast_is_here = asyncio.Event()

        async def slow_payload() -> Any:
            await fast_is_here.wait()
            return array, array

        async def fast_payload() -> Any:
            return array, array

        async def get(name: str, payload: Any) -> None:
            await pull(
                replace(
                    KVAnnouncement(request_id=name, layer=0, start=0, tokens=1, payload=None), payload=payload
                ),
                1,
                1,
                torch.float32,
            )
            order.append(name)
            if name == "fast":
                fast_is_here.set()

        await asyncio.gather(get("slow", slow_payload()), get("fast", fast_payload()))
        return order

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ["fast", "slow"]
