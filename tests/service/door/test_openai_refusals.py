"""Refusals of OpenAI's HTTP API, through OpenAI's own client: rules 13 to 19 of `test_openai.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltafront.service.door.edges.errors import FieldNames, status_of
from deltafront.service.door.openai.errors import error_body
from deltafront.service.errors import Code, DeltafrontError
from deltafront.service.request.run import attempt

from ..inprocess import House
from ..test_faults import outcomes
from ..test_requests import nothing_left
from .openai_calls import HI, JSON, LONG, MODEL, Open, chat, complete

CONTRACT = re.compile(
    r"Prefill|Generate|[Gg]RPC|sampling\.|attention\.|append\.|answered_ids|RESOURCE_|deadline"
)
"""Names of the gRPC contract that error messages over HTTP must not contain."""


def refusal(call: Callable[[], Any], kind: type[openai.APIStatusError]) -> Any:
    """Return the error object, with the response's headers under `headers`."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value.response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert not CONTRACT.search(error["message"]), error["message"]
    return error | {"headers": caught.value.response.headers, "status": caught.value.status_code}


def test_refuses_wrong_bearer_tokens_and_sessions_of_other_callers(
    make_house: Callable[..., House], make_http: Any, connect: Open, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\nbeta\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    address = make_http(house)
    alpha, beta, nobody = (connect(address, token) for token in ("alpha", "beta", "gamma"))
    for call in (lambda: chat(nobody), lambda: complete(nobody, stream=True), nobody.models.list):
        with pytest.raises(openai.AuthenticationError) as caught:
            call()
        assert caught.value.code == "invalid_api_key"
    assert httpx.get(f"{address}/v1/models").status_code == 401
    made = complete(alpha, extra_body={"session_ttl_s": 60}).deltafront["session"]
    session = {"session_id": made["session_id"]}
    with pytest.raises(openai.NotFoundError):
        complete(beta, extra_body=session)
    assert complete(alpha, extra_body=session).usage.completion_tokens == 5


BAD: dict[str, dict[str, Any]] = {
    "model": {"model": 3},
    "messages": {"messages": []},
    "messages[0].role": {"messages": [{"role": "critic", "content": "x"}]},
    "messages[1].content": {"messages": [*HI, {"role": "user"}]},
    "messages[0].content[1]": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]
    },
    "messages[0].tool_calls": {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
    "messages[0].content[0]": {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]},
    "messages[0].content[0].text": {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
    "stream": {"stream": "yes"},
    "stream_options": {"stream_options": {"include_usage": True}},
    "stream_options.include_use": {"stream": True, "stream_options": {"include_use": True}},
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "top_k": {"top_k": -2},
    "seed": {"seed": -2},
    "repetition_penalty": {"repetition_penalty": 0},
    "repetition_penalty ": {"session_id": "d0.x", "repetition_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 2.1},
    "presence_penalty": {"presence_penalty": "much"},
    "min_p": {"min_p": 1.1},
    "min_tokens": {"min_tokens": True},
    "min_tokens ": {"min_tokens": 6},
    "n": {"n": 0},
    "n ": {"n": 129},
    "best_of": {"n": 3, "best_of": 2},
    "best_of ": {"best_of": 2, "stream": True},
    "session_ttl_s  ": {"session_ttl_s": 60, "n": 2, "messages": [*HI, *HI]},
    "logprobs": {"logprobs": 1},
    "top_logprobs": {"top_logprobs": 1},
    "top_logprobs ": {"logprobs": True, "top_logprobs": 21},
    "stop_token_ids": {"stop_token_ids": [3, 258]},
    "stop_token_ids[0]": {"stop_token_ids": ["a"]},
    "logit_bias": {"logit_bias": {"258": 1}},
    "logit_bias ": {"logit_bias": {"hello": 1}},
    "logit_bias  ": {"logit_bias": {"5": 101}},
    "logit_bias.5": {"logit_bias": {"5": "much"}},
    "add_generation_prompt": {"add_generation_prompt": "no"},
    "continue_final_message": {"continue_final_message": True},
    "messages ": {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "messages": [*HI, {"role": "assistant", "content": " "}],
    },
    "request_id": {"request_id": "mine"},
    "stop": {"stop": 7},
    "stop[1]": {"stop": ["a", ""]},
    "stop[0]": {"stop": [None]},
    "max_tokens": {"max_tokens": 0},
    "max_tokens ": {"max_tokens": 3, "max_completion_tokens": 4},
    "method": {"method": "magic"},
    "options.wings": {"method": "dpxa", "options": {"wings": 2}},
    "options.tau": {"method": "dpxa", "options": {"tau": "many"}},
    "method ": {"session_id": "d0.x", "method": "dpxa"},
    "session_ttl_s": {"session_ttl_s": 60},
    "session_ttl_s ": {"session_ttl_s": 10**9, "messages": [*HI, *HI]},
    "page_selection": {"page_selection": "some"},
    "page_selection ": {"page_selection": "delta"},
    "recompute_blocks": {"recompute_blocks": 65},
    "recompute_blocks ": {"recompute_blocks": "many"},
    "cache_salt": {"cache_salt": "x" * 129},
    "timeout_s": {"timeout_s": 0},
    "chat_template_kwargs": {"chat_template_kwargs": {"messages": []}},
    "chat_template_kwargs ": {"chat_template_kwargs": "mood"},
    "sesion_id": {"sesion_id": "d0.x"},
}


@pytest.mark.parametrize("param", BAD)
def test_error_names_the_field_of_a_bad_value(house: House, api: openai.OpenAI, param: str) -> None:
    error = refusal(lambda: chat(api, extra_body=BAD[param]), openai.BadRequestError)
    assert (error["param"], error["type"]) == (param.strip(), "invalid_request_error")
    assert error["message"].startswith(f"{param.strip()}: ")
    assert not house.group.jobs
    nothing_left(house)


@pytest.mark.parametrize(
    "prompt", [7, [], "", ["a", 1], [[1], "b", 2], ["a", ""], [1, -1], [1, "a"], [1, 258], [True]]
)
def test_error_names_a_bad_prompt(api: openai.OpenAI, prompt: Any) -> None:
    assert refusal(lambda: complete(api, prompt), openai.BadRequestError)["param"] == "prompt"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"temperature": NaN}', b"\xff", b'{"model": "\\ud800"}']
)
def test_refuses_a_body_that_is_not_a_json_object(address: str, body: bytes) -> None:
    answer = httpx.post(f"{address}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_refuses_unsupported_fields_by_name(house: House, api: openai.OpenAI) -> None:
    unsupported = {"store": True, "audio": {}}
    for name, value in unsupported.items():
        error = refusal(lambda: chat(api, extra_body={name: value}), openai.BadRequestError)  # noqa: B023
        told = "is not supported by this server: leave it out"
        assert (error["param"], error["message"]) == (name, f"{name}: {told}")
    for name, value in {"logprobs": 21, "echo": 1, "suffix": "x"}.items():
        error = refusal(lambda: complete(api, extra_body={name: value}), openai.BadRequestError)  # noqa: B023
        assert error["param"] == name
    assert not house.group.jobs
    nothing = {"n": 1, "tools": None, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0,
               "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}}  # fmt: skip
    assert chat(api, extra_body=nothing).usage.completion_tokens == 5


TOO_LONG = "This model's maximum context length is 8192 tokens"
"""The words by which litellm recognises a prompt that is too long. LangChain looks for the code in the
message."""


def test_refuses_too_long_prompts_answers_and_bodies_with_codes(api: openai.OpenAI) -> None:
    for field, status, says, ask in (
        ("prompt", 400, "8193 tokens", lambda: complete(api, "x" * 8192)),
        ("messages", 400, "", lambda: chat(api, [{"role": "user", "content": "x" * 8192}])),
        ("max_tokens", 400, "", lambda: complete(api, max_tokens=8193)),
        ("max_tokens", 400, "", lambda: chat(api, max_tokens=8193)),
        (None, 413, "1048576 bytes", lambda: complete(api, "x" * (1 << 20))),
    ):
        error = refusal(ask, openai.APIStatusError)
        assert (error["status"], error["param"]) == (status, field)
        assert error["code"] == ("context_length_exceeded" if status == 400 else "request_too_large")
        assert error["message"].startswith(TOO_LONG) and says in error["message"]
        assert ("context_length_exceeded" in error["message"]) == (status == 400)


def test_refuses_max_tokens_that_do_not_fit_and_cuts_default_lengths(
    make_house: Callable[..., House], make_http: Any, connect: Open
) -> None:
    """OpenAI's API requires that `max_tokens` fits. Without it the answer ends at the last position."""
    house = make_house(model_name=MODEL, default_max_tokens=100)
    api, prompt = connect(make_http(house)), "x" * 8181
    error = refusal(lambda: complete(api, prompt, max_tokens=11), openai.BadRequestError)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "8182 tokens and max_tokens of 11 do not fit the model's 8192 positions" in error["message"]
    assert complete(api, prompt, max_tokens=10).usage.completion_tokens == 10
    for stream in (False, True):
        assert complete(api, prompt, max_tokens=None, stream=stream)
    assert complete(api, prompt, max_tokens=None).usage.completion_tokens == 10
    error = refusal(lambda: chat(api, [*HI, *HI], max_tokens=8192), openai.BadRequestError)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_error_of_a_wrong_type_names_all_types_of_the_field(api: openai.OpenAI) -> None:
    error = refusal(lambda: chat(api, extra_body={"stop": 7}), openai.BadRequestError)
    assert error["message"] == "stop: must be a valid string or a valid list"
    error = refusal(lambda: chat(api, extra_body={"stop": ["a", None]}), openai.BadRequestError)
    assert error["message"] == "stop[1]: must be a valid string"


def test_error_of_an_unknown_attention_method_names_the_served_ones(api: openai.OpenAI) -> None:
    error = refusal(lambda: chat(api, extra_body={"method": "magic"}), openai.BadRequestError)
    listed = error["message"].partition("known: ")[2].split(", ")
    assert {"dense", "dpxa", "xattention", "X+delta"} <= {*listed}
    for name in listed:
        chat(api, extra_body={"method": name.replace("X", "dense"), "options": {}})


def test_unknown_paths_get_an_openai_error_object(address: str) -> None:
    said = {
        ("POST", "/v1/batches"): (404, "files and batches are off: set door.batches to a folder"),
        ("POST", "/v1/embeddings/"): (404, "makes no embeddings"),
        ("GET", "/metrics"): (404, "door.metrics_port"),
        ("GET", "/nowhere"): (404, "GET /nowhere is not served here: there are /v1/models, "),
        ("GET", "/v1/completions"): (405, "GET is not what /v1/completions takes: use POST"),
        ("POST", "/health"): (405, "use GET"),
    }
    for (verb, path), (status, words) in said.items():
        answer = httpx.request(verb, address + path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
        assert words in error["message"], error
        assert error["code"] == ("unknown_url" if status == 404 else None)


def test_unknown_models_sessions_and_routes_are_404(address: str, api: openai.OpenAI) -> None:
    for call in (lambda: api.models.retrieve("gpt"), lambda: chat(api, extra_body={"model": "gpt"})):
        error = refusal(call, openai.NotFoundError)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert MODEL in error["message"]
    error = refusal(lambda: complete(api, extra_body={"session_id": "d0.x"}), openai.NotFoundError)
    assert error["code"] == "session_not_found"
    refusal(lambda: api.embeddings.create(model=MODEL, input="x"), openai.NotFoundError)
    assert httpx.get(f"{address}/v1/completions").status_code == 405


def test_refusal_of_a_full_server_has_a_retry_after_header(house: House, api: openai.OpenAI) -> None:
    house.decode.remembers = False
    house.decode.total = 40
    house.decode.pause_at = 1
    stream = complete(api, LONG, stream=True)
    next(stream)
    for streamed in (True, False):
        error = refusal(lambda: complete(api, LONG, stream=streamed), openai.RateLimitError)  # noqa: B023
        assert error["code"] == "rate_limit_exceeded"
        assert int(error["headers"]["retry-after"]) > 0
        assert "x-should-retry" not in error["headers"]
    house.decode.pause_at = -1
    list(stream)
    error = refusal(lambda: complete(api, "x" * 700), openai.APIStatusError)
    assert (error["status"], error["code"]) == (413, "request_too_large")
    assert error["message"].startswith(TOO_LONG)
    assert "retry-after" not in error["headers"]
    nothing_left(house)


def test_failed_workers_are_a_server_error_with_retry_after(
    house: House, api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_FIRST_PAUSE_S", 0.02)
    house.group.fail_after = [0, 0, 0]
    error = refusal(lambda: complete(api, LONG, stream=True), openai.InternalServerError)
    assert (error["code"], error["type"]) == ("unavailable", "server_error")
    assert int(error["headers"]["retry-after"]) > 0
    house.decode.fail_after = [2, 0, 0]
    stream = complete(api, LONG, stream=True)
    with pytest.raises(openai.APIError, match="a hand-off failed; gave up after 3 tries"):
        list(stream)
    assert outcomes(house) == {("Generate", "unavailable"): 2}
    nothing_left(house)


def test_every_error_has_a_status() -> None:
    for code in Code:
        error = DeltafrontError("trouble")
        error.code = code  # type: ignore[misc]
        assert 400 <= status_of(error) < 600
        assert error_body(error, FieldNames("prompt", ()), 8192)["error"]["message"] == "trouble"


@pytest.mark.parametrize("allowed", [1e-9, 0.2])
def test_error_of_a_deadline_names_the_requests_own_field(
    house: House, api: openai.OpenAI, allowed: float
) -> None:
    """The error names `timeout_s`, not gRPC's deadline, and gives no advice on clocks."""
    house.group.pause_at = 0
    for more in ({}, {"stream": True}):
        asked = {"timeout_s": allowed}
        error = refusal(lambda: complete(api, LONG, extra_body=asked, **more), openai.InternalServerError)  # noqa: B023
        assert (error["status"], error["code"], error["param"]) == (504, "deadline_exceeded", "timeout_s")
        assert error["headers"]["x-should-retry"] == "false"
        assert error["message"].startswith("timeout_s ")
        assert "deadline" not in error["message"] and "clock" not in error["message"]
    house.group.pause_at = -1
    nothing_left(house)
