"""OpenAI's HTTP API through OpenAI's own client, with fake workers. The service keeps these rules
(13 to 19 in `test_openai_refusals.py`):

1. `/v1/models` lists the model with its context length, and finds it by name;
2. a chat is answered with usage, and the client may send the answer back unchanged;
3. a streamed chat has the same text, after a first chunk with the role;
4. a stream ends with a usage chunk if the request asks for one, and only then;
5. a text is completed, whole or streamed;
6. a prompt may be token ids, or a list with one prompt;
7. the tokens are the same as those of gRPC for the same prompt;
8. stop strings end an answer, and held-back text is not lost;
9. sampling options reach the worker;
10. Deltafront's own options reach the worker, and its measurements come back;
11. a prompt can be kept as a session, and a question to it prefills only the question;
12. on request, comments report the progress of prefill; otherwise keep-alive lines are sent;
13. only known bearer tokens may call, and a session belongs to its token;
14. an error names the field of a bad value;
15. an unsupported field is refused by name, unless its value has no effect;
16. a prompt that is too long gets OpenAI's code, and a body that is too long gets 413;
17. unknown models, sessions and paths get 404;
18. a full server answers 429 with Retry-After, or 413 if the request can never fit;
19. failed workers give 503 with Retry-After, or an error event once the answer has begun;
20. a client that disconnects frees everything, in any phase of its request.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltafront import __version__
from deltafront.service.client import DeltafrontClient
from deltafront.service.door import http_stream
from deltafront.workers.model.directory.model_files import ModelError

from ..fakes import EOS
from ..inprocess import HANG_S, House, wait_until
from ..test_faults import outcomes
from ..test_metrics import ended, value
from ..test_requests import collect, expected, ids, nothing_left
from .openai_calls import HI, JSON, LONG, MODEL, Open, chat, complete

HI_READ = "[s:be nice][u:hi][a:"


def test_lists_and_retrieves_the_served_model(api: openai.OpenAI) -> None:
    (model,) = api.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 8192)  # type: ignore[attr-defined]
    assert api.models.retrieve(MODEL) == model


def test_path_may_end_with_a_slash(address: str) -> None:
    """The door does not redirect, because after a proxy a redirect could point elsewhere."""
    for path in ("/v1/models/", f"/v1/models/{MODEL}/", "/health/"):
        answer = httpx.get(address + path)
        assert (answer.status_code, answer.history) == (200, [])
        assert answer.json() == httpx.get(address + path.rstrip("/")).json()
    body = {"model": MODEL, "prompt": "p", "max_tokens": 2}
    answer = httpx.post(f"{address}/v1/completions/", json=body)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)


def test_health_needs_no_token(
    make_house: Callable[..., House], make_http: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\n")
    house = make_house(tokens_file=str(tmp_path / "tokens"))
    address = make_http(house)
    assert (httpx.get(f"{address}/health").status_code, httpx.head(f"{address}/health").status_code) == (
        200,
    ) * 2
    house.directory.workers.clear()
    wait_until(lambda: not house.door._requests.ready, "the worker is still there")
    answer = httpx.get(f"{address}/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


def test_cache_salts_keep_prefix_caches_apart(house: House, api: openai.OpenAI) -> None:
    def cached(**extra: Any) -> int:
        return int(complete(api, LONG, extra_body=extra).usage.prompt_tokens_details.cached_tokens)

    complete(api, LONG, extra_body={"session_ttl_s": 600})
    salted = {"cache_salt": "mine"}
    assert cached() > 0
    assert cached(**salted) == 0
    complete(api, LONG, extra_body={"session_ttl_s": 600, **salted})
    assert cached(**salted) > 0
    assert cached(cache_salt="another") == 0


def test_a_chat_is_answered(house: House, api: openai.OpenAI) -> None:
    done = chat(api)
    text = expected(ids(HI_READ, bos=False), 5)
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        text,
        "length",
    )
    assert (done.object, done.model, done.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (20, 5, 25)
    assert done.usage.prompt_tokens_details.cached_tokens == 0
    parts = [{"type": "text", "text": "and "}, {"type": "text", "text": "so?"}]
    chat(api, [*HI, choice.message, {"role": "user", "content": parts}])
    read = bytes(house.group.jobs[-1].token_ids[::4]).decode()
    assert read == f"[s:be nice][u:hi][a:{text}][u:and so?][a:"
    chat(api, [{"role": "developer", "content": "brief"}, *HI])
    assert bytes(house.group.jobs[-1].token_ids[::4]).decode() == "[s:brief][u:hi][a:"
    nothing_left(house)
    assert outcomes(house) == {("Generate", "finished"): 3}


def test_streamed_chat_equals_the_unstreamed_one(house: House, api: openai.OpenAI) -> None:
    chunks = list(chat(api, stream=True))
    assert {(chunk.object, chunk.id) for chunk in chunks} == {("chat.completion.chunk", chunks[0].id)}
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(deltas) == expected(ids(HI_READ, bos=False), 5)
    assert len([delta for delta in deltas if delta]) == 5
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    nothing_left(house)
    wait_until(lambda: outcomes(house), "the request is counted once its stream has ended")
    assert outcomes(house) == {("Generate", "finished"): 1}


def test_stream_ends_with_usage_on_request(api: openai.OpenAI) -> None:
    *chunks, last = chat(api, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.total_tokens) == ([], 25)
    assert {chunk.usage for chunk in chunks} == {None}
    assert all(chunk.choices and chunk.usage is None for chunk in chat(api, stream=True))


@pytest.mark.parametrize("ask", [chat, complete])
def test_every_chunk_has_usage_so_far_on_request(api: openai.OpenAI, ask: Callable[..., Any]) -> None:
    """vLLM's `continuous_usage_stats`."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask(api, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 and {*range(1, 6)} <= {*counts}
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    assert (last.choices, last.usage.completion_tokens) == ([], 5)
    chunks = ask(api, stream=True, stream_options={"continuous_usage_stats": True})
    assert {chunk.usage for chunk in chunks} == {None}, "without include_usage it has no effect, as in vLLM"


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_completed(api: openai.OpenAI, stream: bool) -> None:
    done = complete(api, LONG, stream=stream)
    if not stream:
        assert (done.object, done.id[:5], done.usage.prompt_tokens) == ("text_completion", "cmpl-", 501)
    choices = [chunk.choices[0] for chunk in (done if stream else [done])]
    assert "".join(choice.text for choice in choices) == expected(ids(LONG), 5)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_prompt_may_be_token_ids(house: House, api: openai.OpenAI) -> None:
    for prompt in ([1, 2, 257], [[1, 2, 257]]):
        assert complete(api, prompt).usage.prompt_tokens == 3
        assert house.group.jobs[-1].token_ids == b"".join(i.to_bytes(4, "little") for i in (1, 2, 257))
    assert complete(api, ["abc"]).usage.prompt_tokens == 4


def test_http_generates_the_same_tokens_as_grpc(house: House, api: openai.OpenAI) -> None:
    house.decode.remembers = False
    with DeltafrontClient(house.address) as client:
        said, _, _, _ = collect(client.generate(HI, max_tokens=5))
        assert chat(api).choices[0].message.content == said
        said, _, _, _ = collect(client.generate(LONG, max_tokens=5))
        assert complete(api, LONG).choices[0].text == said
    read = [(job.token_ids, job.method) for job in house.group.jobs]
    assert read[::2] == read[1::2]
    sampled = [job.sampling for job in house.decode.jobs]
    assert sampled[::2] == sampled[1::2]


def test_usage_counts_cached_prompt_tokens(house: House, api: openai.OpenAI) -> None:
    first, again = (complete(api, LONG) for _ in range(2))
    assert [done.choices[0].text for done in (first, again)] == [first.choices[0].text] * 2
    cached = [done.usage.prompt_tokens_details.cached_tokens for done in (first, again)]
    assert cached == [0, 496]
    for opted_out in ({"skip_cache": True}, {"cache_salt": "mine"}):
        done = complete(api, LONG, extra_body=opted_out)
        assert done.usage.prompt_tokens_details.cached_tokens == 0
    secret = "s" * 500
    for _ in range(2):
        done = complete(api, secret, extra_body={"retain_s": 0})
        assert done.usage.prompt_tokens_details.cached_tokens == 0
    nothing_left(house)


def test_usage_names_the_tier_that_cached_tokens_came_from(
    house: House, api: openai.OpenAI, client: DeltafrontClient
) -> None:
    complete(api, LONG)
    house.decode.host_tokens, house.decode.disk_tokens = 160, 48
    details = complete(api, LONG).usage.prompt_tokens_details
    assert (details.cached_tokens, details.cached_tokens_details) == (
        496,
        {"device": 288, "host": 160, "storage": 48},
    )
    _, _, finish, _ = collect(client.generate(LONG, max_tokens=5))
    assert (finish.usage.host_tokens, finish.usage.disk_tokens) == (160, 48)
    ended(house, 3)
    held = finish.usage.cached_tokens + 496
    for source, tokens in (("entries", held - 2 * 208), ("host", 2 * 160), ("disk", 2 * 48)):
        assert value(house, "cached_tokens_total", source=source) == tokens


@pytest.mark.parametrize(
    ("given", "retained"),
    [
        ({}, 0.0),
        ({"prompt_cache_retention": "in_memory"}, 0.0),
        ({"prompt_cache_retention": "24h"}, 86_400.0),
        ({"retain_s": 90}, 90.0),
        ({"retain_s": 0}, None),  # not cached
    ],
)
def test_request_sets_how_long_its_prompt_is_retained(
    house: House, api: openai.OpenAI, given: dict[str, Any], retained: float | None
) -> None:
    complete(api, LONG, extra_body=given)
    key = house.decode.reservations[-1].key
    assert key is not None and (key.retain_s if key.remembers else None) == retained


@pytest.mark.parametrize("stop", ["STOP", ["STOP", "never"]])
def test_stop_strings_end_the_answer_and_are_not_shown(house: House, api: openai.OpenAI, stop: Any) -> None:
    house.decode.script = list(b"abSTxSTOPnever")
    done = chat(api, stop=stop, max_tokens=16)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("abSTx", "stop")
    house.decode.script = [*b"abST", EOS]
    chunks = [chunk.choices[0] for chunk in complete(api, stop=stop, max_tokens=16, stream=True)]
    assert [chunk.text for chunk in chunks] == ["a", "b", "ST", ""]
    assert chunks[-1].finish_reason == "stop"
    nothing_left(house)


def test_chat_template_kwargs_reach_the_template(house: House, api: openai.OpenAI) -> None:
    """Tries OpenAI's client and ours, with a prompt and with messages after a session."""
    glad: dict[str, Any] = {"chat_template_kwargs": {"mood": "glad"}}
    chat(api, extra_body=glad)
    assert bytes(house.group.jobs[-1].token_ids[::4]).decode() == f"{HI_READ}glad"
    chat(api)
    assert bytes(house.group.jobs[-1].token_ids[::4]).decode() == HI_READ
    with DeltafrontClient(house.address) as client:
        collect(client.generate(HI, max_tokens=2, **glad))
        assert bytes(house.group.jobs[-1].token_ids[::4]).decode() == f"{HI_READ}glad"
        (*_, kept) = client.prefill([*HI, *HI], session_ttl_s=60)
        asked = {"session_id": kept.session.session_id, **glad}  # type: ignore[union-attr]
        assert chat(api, extra_body=asked).usage.completion_tokens == 5
    assert bytes(house.decode.jobs[-1].extend_ids[::4]).decode() == "[u:hi][a:glad"


def test_sampling_options_reach_the_worker(house: House, api: openai.OpenAI) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": None, "max_completion_tokens": 3}
    chat(api, **options, extra_body={"top_k": 4, "ignore_eos": True})
    sampling = house.decode.jobs[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 7, 3)
    assert (sampling.top_k, sampling.ignore_eos) == (4, True)


@pytest.mark.parametrize(
    ("said", "used"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({"do_sample": True, "top_k": -1}, (1.0, 1.0, 0)),
        ({"temperature": 0.6}, (0.6, 1.0, 0)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, (0.0, 1.0, 0)),
    ],
)
def test_uses_the_models_sampling_defaults_only_on_request(
    model: Path,
    make_house: Callable[..., House],
    make_http: Callable[..., str],
    connect: Open,
    said: dict[str, Any],
    used: tuple[float, float, int],
) -> None:
    (model / "generation_config.json").write_text(json.dumps(said))
    for default, expected_defaults in (("neutral", (0.0, 1.0, 0)), ("model", used)):
        house = make_house(model_name=MODEL, sampling_defaults=default)
        chat(connect(make_http(house)))
        chat(connect(make_http(house)), temperature=0.25, top_p=0.5, extra_body={"top_k": 3})
        with DeltafrontClient(house.address) as client:
            collect(client.generate(HI, max_tokens=5))
            collect(client.generate(HI, max_tokens=5, temperature=0.25, top_p=0.5, top_k=3))
            told = client.info().default_sampling
        assert told is not None and (told.temperature, told.top_p, told.top_k) == expected_defaults
        sampled = [
            (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) for job in house.decode.jobs
        ]
        assert sampled == [expected_defaults, (0.25, 0.5, 3)] * 2


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 2}, {"top_k": "many"}, {"top_p": [1]}])
def test_error_names_invalid_sampling_defaults(
    model: Path, make_house: Callable[..., House], wrong: dict[str, Any]
) -> None:
    (model / "generation_config.json").write_text(json.dumps(wrong))
    make_house()
    with pytest.raises(ModelError, match=r"generation_config.json: .*; door.sampling_defaults: neutral"):
        make_house(sampling_defaults="model")


def test_requests_without_a_seed_get_different_seeds(house: House, api: openai.OpenAI) -> None:
    """Some front ends send -1 for a random seed."""
    for seed in (None, openai.omit, -1, -1, 0, 0):
        chat(api, temperature=1, seed=seed)
    *drawn, one, other = [job.sampling.seed for job in house.decode.jobs]
    fixed = [one, other]
    assert len({*drawn}) == 4 and min(drawn) >= 0
    assert fixed == [0, 0]


def test_deltafront_options_reach_the_service(house: House, api: openai.OpenAI) -> None:
    extra = {
        "skip_cache": True,
        "retain_s": 60,
        "method": "xattention",
        "options": {"tau": 0.75, "min_tokens": 0},
        "page_selection": "full",
        "recompute_blocks": 2,
        "timeout_s": 600,
    }
    done = complete(api, LONG, extra_body=extra)
    job = house.group.jobs[-1]
    assert job.method.name == "xattention"
    assert dict(job.method.options)["tau"] == 0.75
    assert job.deadline is not None
    reservation = house.decode.reservations[-1]
    assert reservation.options.page_selection == "full"
    assert reservation.options.recompute_blocks == 2
    key = reservation.key
    assert key is not None and key.retain_s == 60
    *_, last = complete(api, LONG, extra_body=extra, stream=True)
    for report in (done.deltafront, last.deltafront):
        assert sum(report["timings"]["parts"].values()) == pytest.approx(report["timings"]["ttft_seconds"])
        assert (report["density"]["method"], report["density"]["mean"]) == ("xattention", 0.75)
        assert (report["page_share"], report["session"]) == (0.5, None)
        assert report["recomputed_tokens"] == 256


def test_session_is_kept_and_continued_over_http(house: House, api: openai.OpenAI) -> None:
    document = {"role": "user", "content": "d" * 300}
    question = {"role": "user", "content": "why?"}
    made = chat(api, [document, question], extra_body={"session_ttl_s": 600})
    session = made.deltafront["session"]
    assert session["tokens"] == len(f"[s:be nice][u:{document['content']}]")
    asked = chat(api, [question], extra_body={"session_id": session["session_id"]})
    assert asked.choices[0].message.content == made.choices[0].message.content
    assert asked.usage.prompt_tokens == made.usage.prompt_tokens
    assert asked.usage.prompt_tokens_details.cached_tokens == session["tokens"]
    assert len(house.group.jobs) == 1
    text = complete(api, "abc", extra_body={"session_ttl_s": 600}).deltafront["session"]
    done = complete(api, "def", extra_body={"session_id": text["session_id"]})
    assert done.choices[0].text == expected(ids("abcdef"), 5)
    assert done.usage.prompt_tokens_details.cached_tokens == 4


def lines(address: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a streamed completion that are not empty, as they arrive."""
    request = {"model": MODEL, "stream": True, **body}
    with httpx.stream("POST", f"{address}/v1/completions", json=request, timeout=HANG_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield from filter(None, response.iter_lines())


def test_stream_comments_tell_the_prefill_progress(
    house: House, make_http: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_stream, "_LINE_S", 0.0)
    house.decode.remembers = False
    asked = {"prompt": LONG, "max_tokens": 1, "stream_options": {"include_progress": True}}
    stream = lines(make_http(house), asked)
    said = [next(stream).partition(", tiles ") for _ in range(4)]
    assert [line for line, *_ in said] == [f": read {n} of 501 tokens" for n in (128, 256, 384, 501)]
    assert said[0][2] == "0:2.55489022/2.55489022 1:2.55489022/2.55489022"
    assert said[3][2] == "0:10/10 1:5/10"
    assert [line[:6] for line in stream] == ["data: "] * 3
    address = make_http(house, keep_alive_s=0.01)
    for body, line in ((asked, ": waiting"), ({"prompt": LONG, "max_tokens": 1}, " ")):
        house.group.pause_at = 0
        waiting = lines(address, body)
        assert [next(waiting) for _ in range(3)] == [line] * 3
        house.group.pause_at = -1
        assert list(waiting)[-1] == "data: [DONE]"
    nothing_left(house)


@pytest.mark.parametrize(("rate", "pause_at"), [(100.0, 0), (1e6, -1)])
def test_header_tells_when_the_first_token_is_expected(
    house: House, make_http: Callable[..., str], rate: float, pause_at: int
) -> None:
    """Before a wait of a second or more it comes at once, here while prefill is paused."""
    house.group.rate, house.group.pause_at, house.decode.remembers = rate, pause_at, False
    house.loop.run(house.fleet.refresh())
    request = {"model": MODEL, "stream": True, "prompt": LONG, "max_tokens": 1}
    url, begun = f"{make_http(house)}/v1/completions", time.monotonic()
    with httpx.stream("POST", url, json=request, timeout=HANG_S) as response:
        expected_s = float(response.headers["x-expected-first-token-seconds"])
        assert 501 / rate - 1e-3 <= expected_s <= 501 / rate + time.monotonic() - begun
        house.group.pause_at = -1
        rest = [line for line in response.iter_lines() if line]
    assert rest[-1] == "data: [DONE]"
    nothing_left(house)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("doing", ["waiting", "reading", "answering"])
def test_client_that_leaves_frees_its_pages(
    house: House, connect: Open, make_http: Callable[..., str], doing: str, streamed: bool
) -> None:
    """The work never ends by itself, so only the disconnect can free its pages."""
    worker = house.decode if doing == "answering" else house.group
    worker.pause_at = {"waiting": 0, "reading": 2, "answering": 3}[doing]
    address = make_http(house, keep_alive_s=0.01)
    if streamed:
        leave = complete(connect(address), LONG, max_tokens=50, stream=True).close
    else:  # OpenAI's client would wait for the whole answer
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": LONG}), JSON)
        leave = connection.close
    assert worker.paused.wait(HANG_S)
    assert house.pages_used()
    leave()
    wait_until(lambda: outcomes(house) == {("Generate", "cancelled"): 1}, "the request is not cancelled")
    nothing_left(house)
    assert worker.pause_at >= 0
    assert worker.cancelled == [house.group.jobs[0].request_id]


def test_version_and_ping_answer_as_vllms_do(address: str) -> None:
    assert httpx.get(f"{address}/ping").json() == {"status": "ok"}
    assert httpx.get(f"{address}/version").json() == {"version": __version__}
