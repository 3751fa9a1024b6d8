"""Details of OpenAI's and Anthropic's OpenAPI files, which `clients/run_schemathesis.py` checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ..inprocess import HANG_S, House, settings
from .openai_calls import HI, MODEL, chat, complete
from .test_messages import TOOL, events_of, message, post
from .test_tools import ROME, call, model_with_tools, prompt_of


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    model = model_with_tools(tmp_path / "calls")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] += "{{ reasoning_effort }}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return make_house(settings(model, model_name=MODEL))


@pytest.mark.parametrize("ask", [chat, complete])
def test_chunks_have_usage_only_if_the_request_asks_for_it(
    api: openai.OpenAI, ask: Callable[..., Any]
) -> None:
    assert not any("usage" in chunk.model_fields_set for chunk in ask(api, stream=True))
    *chunks, _last = ask(api, stream=True, stream_options={"include_usage": True})
    assert chunks and all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)


def test_accepts_whole_numbers_with_a_fraction_of_zero(house: House, api: openai.OpenAI) -> None:
    sent = {
        "max_tokens": 3.0,
        "seed": 7.0,
        "top_k": 2.0,
        "min_tokens": 1.0,
        "stop_token_ids": [5.0],
        "n": 1.0,
    }
    assert chat(api, temperature=1, extra_body=sent).usage.completion_tokens == 3
    sampling = house.decode.jobs[-1].sampling
    assert (sampling.seed, sampling.top_k, 5 in sampling.stop_token_ids) == (7, 2, True)
    with pytest.raises(openai.BadRequestError, match="max_tokens: must be a valid integer"):
        chat(api, extra_body={"max_tokens": 3.5})


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_request_may_leave_out_the_model(address: str, path: str) -> None:
    text = {"completions": {"prompt": "p"}, "responses": {"input": "hi"}}.get(path, {"messages": HI})
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = httpx.post(f"{address}/v1/{path}", json={**text, limit: 3}, timeout=HANG_S)
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


def test_error_quotes_a_field_without_a_name(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'': is not supported"):
        chat(api, extra_body={"": 1})


def test_stored_response_is_not_streamed(api: openai.OpenAI) -> None:
    made = api.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    with pytest.raises(openai.BadRequestError, match="stream: is not supported"):
        api.responses.retrieve(made.id, stream=True)
    assert api.responses.retrieve(made.id).output_text == made.output_text


def test_reasoning_effort_reaches_the_chat_template(house: House, api: openai.OpenAI) -> None:
    chat(api, reasoning_effort="low")
    assert prompt_of(house).endswith("[a:low")
    api.responses.create(model=MODEL, input="hi", reasoning={"effort": "high"}, max_output_tokens=3)
    assert prompt_of(house).endswith("[a:high")
    chat(api, reasoning_effort="low", extra_body={"chat_template_kwargs": {"reasoning_effort": "high"}})
    assert prompt_of(house).endswith("[a:high")
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort: must be text"):
        api.responses.create(model=MODEL, input="hi", reasoning={"effort": 1})  # type: ignore[typeddict-item]


def test_messages_have_every_field_that_anthropic_requires(address: str, house: House) -> None:
    house.decode.script = [*f"Let me see.\n{call('weather', ROME)}".encode(), 257]
    answer = message(address, tools=[TOOL])
    text, called = answer["content"]
    assert text["citations"] is None and called["caller"] == {"type": "direct"}
    usage = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
    assert [answer["usage"][name] for name in usage] == [None] * 5
    begin, *_, delta, _stop = events_of(post(address, stream=True, tools=[TOOL]))
    for given in (answer, begin["message"], delta["delta"]):
        assert (given["stop_details"], given["container"]) == (None, None)
    turns = [*HI, {"role": "assistant", "content": answer["content"]}, *HI]
    sent = {"model": MODEL, "messages": turns}
    counted = httpx.post(f"{address}/v1/messages/count_tokens", json=sent, timeout=HANG_S)
    assert counted.status_code == 200, "an answer may be sent back"
