"""Concurrent requests, and requests that are cancelled."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tokenizers import Tokenizer

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Haystack, Sizes, Table
from .wire import PATIENCE_S, Wire, method, packed, text

pytestmark = pytest.mark.timeout(1800)  # prefills a full-size document twenty times


def one_token(prompt: pb.Prompt) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(max_tokens=1, ignore_eos=True)
    return pb.GenerateRequest(prompt=prompt, attention=method("dense"), sampling=sampling)


def chunk_seconds(wire: Wire, long: pb.Prompt) -> tuple[float, int]:
    """Prefill a long prompt alone. Return the seconds per chunk and the number of chunks."""
    answer = wire.generate(one_token(long))
    chunks = -(-answer.finish.usage.prompt_tokens // wire.info().chunk_tokens)
    return answer.client_ttft / chunks, chunks


def test_short_prompt_does_not_wait_for_a_long_one(
    wire: Wire, haystack: Haystack, tokenizer: Tokenizer, sizes: Sizes, table: Table
) -> None:
    """The short prompt is prefilled between the long one's chunks, and the long one's timings show it. If a
    busy machine finishes the long prompt first, try again."""
    ids = tokenizer.encode(haystack.text).ids * (1 if sizes.timed else 3)
    long, short = pb.Prompt(token_ids=packed(ids)), pb.Prompt(token_ids=packed(ids[: sizes.short]))
    alone = [wire.generate(one_token(short)) for _ in range(3 if sizes.timed else 1)]
    for _ in range(3):
        with ThreadPoolExecutor(1) as thread:
            reading = threading.Event()
            reads = thread.submit(wire.generate, one_token(long), reading=reading)
            assert reading.wait(PATIENCE_S), "nothing of the long prompt was read"
            beside = wire.generate(one_token(short))
            behind = reads.result()
        assert behind.token_ids
        assert beside.token_ids == alone[0].token_ids
        if behind.parts["prefill.other_requests"] > 0:
            break
    assert behind.parts["prefill.other_requests"] > 0, "the short prompt waited for the long one"
    if sizes.timed:
        chunk, _ = chunk_seconds(wire, long)
        fastest = min(answer.client_ttft for answer in alone)
        table.add("short prompt's TTFT alone, s", round(fastest, 3))
        table.add("short prompt's TTFT beside the long one, s", round(beside.client_ttft, 3))
        table.add("one chunk of the long prompt, s", round(chunk, 3))
        assert beside.client_ttft <= fastest + 2 * chunk


def test_cancelled_streams_free_every_page(wire: Wire, beginning: str, sizes: Sizes, table: Table) -> None:
    rng = random.Random(5)
    chunk, chunks = chunk_seconds(wire, text(beginning))
    assert chunks > 1 and wire.pages_used() == 0
    whole = chunk * chunks
    longest = 0.0
    moments = [0.0, 0.01, *(rng.uniform(0.0, 1.3 * whole) for _ in range(sizes.cancels - 2))]
    for after in moments:
        stream = wire.start(
            pb.GenerateRequest(
                prompt=text(beginning), sampling=pb.SamplingOptions(max_tokens=64, ignore_eos=True)
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
        longest = max(longest, wire.seconds_to_no_page())
    table.add(f"longest time to zero pages after {len(moments)} cancels, s", round(longest, 3))
    table.add("bound (one chunk + 1 s), s", round(chunk + 1.0, 3))
    assert longest < chunk + 1.0 or not sizes.timed
    assert wire.generate(one_token(text("Call me"))).token_ids


@pytest.mark.parametrize("tokens", [1, 4000])
def test_a_deadline_ends_a_request_in_time(wire: Wire, haystack: Haystack, sizes: Sizes, tokens: int) -> None:
    """The deadline passes during prefill (1 token), and during the answer."""
    if not sizes.timed:
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
