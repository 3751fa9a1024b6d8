"""Requests beside each other and requests that go away."""

from __future__ import annotations

import http.client as http_client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Haystack, Sizes, Table
from .wire import PATIENCE_S, Wire, method, packed, text

pytestmark = pytest.mark.timeout(1800)  # twenty times a document at full size


TOKENS = "deltafront_inter_token_latency_seconds_count"
CANCELLED = ("deltafront_requests_total", 'method_rpc="Generate"', 'outcome="cancelled"')


def one_token(prompt: pb.Prompt) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(max_tokens=1, ignore_eos=True)
    return pb.GenerateRequest(prompt=prompt, attention=method("dense"), sampling=sampling)


def chunk_seconds(wire: Wire, long: pb.Prompt) -> tuple[float, int]:
    """Seconds per chunk of a long prompt alone, and its chunks."""
    answer = wire.generate(one_token(long))
    chunks = -(-answer.finish.usage.prompt_tokens // wire.info().chunk_tokens)
    return answer.client_ttft / chunks, chunks


def test_a_short_prompt_does_not_wait_behind_a_long_one(
    wire: Wire, haystack: Haystack, tokenizer: Tokenizer, sizes: Sizes, table: Table
) -> None:
    """It is read between the long one's chunks, whose account says so. Tried again where a busy machine has
    read all of the long one before the short one comes."""
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


def test_cancelled_streams_leave_no_page(wire: Wire, beginning: str, sizes: Sizes, table: Table) -> None:
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


@pytest.mark.parametrize("events", [0, 1])
def test_an_http_client_that_leaves_leaves_no_page(
    wire: Wire, http: str, beginning: str, sizes: Sizes, table: Table, events: int
) -> None:
    """OpenAI's own client leaves its stream, through Serve's HAProxy: while its prompt is read, and as the
    answer begins. The answer would be longer than anybody waits here."""
    chunk, _ = chunk_seconds(wire, text(beginning))
    cancelled = wire.counted(*CANCELLED)
    with OpenAI(base_url=f"{http}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        stream = client.completions.create(
            model=wire.info().model,
            prompt=beginning,
            max_tokens=8000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(events):
            next(stream)
        stream.close()
    took = wire.seconds_to_no_page()
    table.add(f"seconds to zero pages after an HTTP client left at event {events}", round(took, 3))
    assert wire.counted(*CANCELLED) == cancelled + 1
    assert took < chunk + 1.0 or not sizes.timed


@pytest.mark.parametrize("answering", [False, True], ids=["reading", "answering"])
def test_an_http_client_that_leaves_before_a_whole_answer_leaves_no_page(
    wire: Wire, http: str, beginning: str, sizes: Sizes, table: Table, answering: bool
) -> None:
    """Not streamed, so that nothing is written to it meanwhile: through Serve's HAProxy, while the prompt is
    read, and in the middle of an answer that would be longer than anybody waits here."""
    chunk, _ = chunk_seconds(wire, text(beginning))
    cancelled, tokens = wire.counted(*CANCELLED), wire.counted(TOKENS)
    ask = {"model": wire.info().model, "prompt": beginning, "max_tokens": 8000, "ignore_eos": True}
    connection = http_client.HTTPConnection(http.removeprefix("http://"), timeout=PATIENCE_S)
    body = json.dumps(ask).encode()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    time.sleep(0.05)  # in two pieces, as many clients do: HAProxy may treat them otherwise
    connection.send(body)
    until = time.monotonic() + PATIENCE_S
    while not (wire.counted(TOKENS) > tokens + 20 if answering else wire.pages_used()):
        assert time.monotonic() < until, "the request does not begin"
        time.sleep(0.02)
    connection.close()
    took = wire.seconds_to_no_page()
    where = "in its answer" if answering else "while it was read"
    table.add(f"seconds to zero pages after a whole answer's HTTP client left {where}", round(took, 3))
    assert wire.counted(*CANCELLED) == cancelled + 1
    assert took < chunk + 1.0 or not sizes.timed


def test_many_cancelled_at_once(wire: Wire, haystack: Haystack, sizes: Sizes) -> None:
    """Together, so that they queue behind each other: a cancel must also reach what waits."""
    chunk = chunk_seconds(wire, text(haystack.text[:4000]))[0] if sizes.timed else 0.0
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
    took = wire.seconds_to_no_page()
    assert took < 2 * chunk + 2.0 or not sizes.timed


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
    wire.seconds_to_no_page()


@pytest.mark.parametrize("tokens", [1, 4000])
def test_a_deadline_ends_a_request_in_time(wire: Wire, haystack: Haystack, sizes: Sizes, tokens: int) -> None:
    """While it is read (1 token), and while it answers."""
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
