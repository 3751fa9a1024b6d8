"""Requests beside each other and requests that go away."""

from __future__ import annotations

import random
import threading
import time

import grpc
import pytest
from tokenizers import Tokenizer

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Haystack, Sizes, Table
from .wire import Answer, Wire, method, packed, text

pytestmark = pytest.mark.timeout(1800)  # twenty times a document at full size


HANG_S = 60.0
"""A guard against hanging, where no time is asserted."""


def asking(prompt: pb.Prompt) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(max_tokens=1, ignore_eos=True)
    return pb.GenerateRequest(prompt=prompt, attention=method("dense"), sampling=sampling)


def first_token(wire: Wire, prompt: pb.Prompt) -> Answer:
    return wire.generate(asking(prompt))


def chunk_seconds(wire: Wire, long: pb.Prompt) -> tuple[float, int]:
    """Seconds per chunk of a long prompt alone, and its chunks."""
    answer = first_token(wire, long)
    chunks = -(-answer.finish.usage.prompt_tokens // wire.info().chunk_tokens)
    return answer.client_ttft / chunks, chunks


def test_a_short_prompt_does_not_wait_behind_a_long_one(
    wire: Wire, haystack: Haystack, tokenizer: Tokenizer, sizes: Sizes, table: Table, timed: bool
) -> None:
    ids = tokenizer.encode(haystack.text).ids
    long, short = pb.Prompt(token_ids=packed(ids)), pb.Prompt(token_ids=packed(ids[: sizes.short]))
    chunk, _ = chunk_seconds(wire, long)
    alone = min(first_token(wire, short).client_ttft for _ in range(3))
    begun, behind = threading.Event(), list[pb.GenerateResponse]()

    def read_long() -> None:
        for response in wire.start(asking(long)):
            behind.append(response)
            begun.set()

    thread = threading.Thread(target=read_long)
    thread.start()
    assert begun.wait(HANG_S), "the long prompt is not read"
    beside = first_token(wire, short)
    assert thread.is_alive(), "the short prompt waited for the long one"
    thread.join()
    table.add("short prompt's TTFT alone, s", round(alone, 3))
    table.add("short prompt's TTFT beside the long one, s", round(beside.client_ttft, 3))
    table.add("one chunk of the long prompt, s", round(chunk, 3))
    assert beside.client_ttft <= alone + 2 * chunk or not timed
    assert any(response.HasField("token") for response in behind)


def test_cancelled_streams_leave_no_page(
    wire: Wire, haystack: Haystack, sizes: Sizes, table: Table, timed: bool
) -> None:
    rng = random.Random(5)
    chunk, _ = chunk_seconds(wire, text(haystack.text))
    assert wire.pages_used() == 0
    whole = chunk * (sizes.document / wire.info().chunk_tokens)
    longest, bound = 0.0, chunk + 1.0 if timed else HANG_S
    moments = [0.0, 0.01, *(rng.uniform(0.0, 1.3 * whole) for _ in range(sizes.cancels - 2))]
    for after in moments:
        stream = wire.start(
            pb.GenerateRequest(
                prompt=text(haystack.text), sampling=pb.SamplingOptions(max_tokens=64, ignore_eos=True)
            )
        )
        timer = threading.Timer(after, stream.cancel)
        timer.start()
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.CANCELLED
        timer.join()
        cancelled = time.perf_counter()
        while wire.pages_used():
            assert time.perf_counter() - cancelled < bound, f"pages held after a cancel at {after:.2f} s"
            time.sleep(0.02)
        longest = max(longest, time.perf_counter() - cancelled)
    table.add(f"longest time to zero pages after {len(moments)} cancels, s", round(longest, 3))
    table.add("bound (one chunk + 1 s), s", round(chunk + 1.0, 3))
    assert first_token(wire, text("Call me")).token_ids


def test_many_cancelled_at_once(wire: Wire, haystack: Haystack, timed: bool) -> None:
    """Together, so that they queue behind each other: a cancel must also reach what waits."""
    chunk, _ = chunk_seconds(wire, text(haystack.text[:4000]))
    streams = []
    for _ in range(4):
        request = pb.GenerateRequest(
            prompt=text(haystack.text[: len(haystack.text) // 2]), sampling=pb.SamplingOptions(max_tokens=8)
        )
        streams.append(wire.start(request))
    for stream in streams:
        next(iter(stream))
    time.sleep(0.5)
    for stream in streams:
        stream.cancel()
    until = time.perf_counter() + (2 * chunk + 2.0 if timed else HANG_S)
    while wire.pages_used():
        assert time.perf_counter() < until, "pages held after cancelling four streams"
        time.sleep(0.05)


def test_a_full_pool_is_refused_with_a_time(wire: Wire, haystack: Haystack) -> None:
    info = wire.info()
    room = info.decode_pages_total * info.page_tokens
    request = pb.GenerateRequest(
        prompt=text(haystack.text),
        sampling=pb.SamplingOptions(max_tokens=int(0.6 * room) - haystack.tokens, ignore_eos=True),
    )
    held = []
    try:
        refused = None
        for _ in range(3):
            stream = wire.start(request)
            try:
                next(stream)
                held.append(stream)
            except grpc.RpcError as error:
                refused = error
                break
        assert refused is not None, "the pool never filled"
        assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(refused.trailing_metadata())
        assert float(trailing["retry-after"]) > 0
    finally:
        for stream in held:
            stream.cancel()
    until = time.perf_counter() + HANG_S
    while wire.pages_used():
        assert time.perf_counter() < until
        time.sleep(0.1)


@pytest.mark.parametrize("tokens", [1, 4000])
def test_a_deadline_ends_a_request_in_time(wire: Wire, haystack: Haystack, timed: bool, tokens: int) -> None:
    """While it is read (1 token), and while it answers."""
    if not timed:
        pytest.skip("asserts a time: pytest --acceptance")
    prompt = text(haystack.text if tokens == 1 else "Call me")
    sampling = pb.SamplingOptions(max_tokens=tokens, ignore_eos=True)
    request = pb.GenerateRequest(prompt=prompt, attention=method("dense"), sampling=sampling)
    request.deadline.FromMicroseconds(round((time.time() + 1.0) * 1e6))
    started = time.perf_counter()
    with pytest.raises(grpc.RpcError) as caught:
        list(wire.start(request))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.perf_counter() - started < 1.6
