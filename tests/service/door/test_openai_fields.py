"""All fields of OpenAI's and vLLM's clients are known, and values without effect are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from tokenizers import Tokenizer, processors

from deltafront.service.door.openai import requests as openai_requests
from deltafront.service.request.calls import SpecialTokens
from deltafront.service.request.text.tokenizer import TextTokenizer

from ..inprocess import House
from ..test_requests import nothing_left
from .openai_calls import MODEL, chat, complete

CHAT = chat_params.CompletionCreateParamsBase.__annotations__.keys()
TEXT = text_params.CompletionCreateParamsBase.__annotations__.keys()
VLLM = {
    *"use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids".split(),
    *"include_stop_str_in_output ignore_eos min_tokens skip_special_tokens truncation_side".split(),
    *"spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs logprob_token_ids".split(),
    *"allowed_token_ids bad_words echo add_generation_prompt continue_final_message".split(),
    *"add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs priority".split(),
    *"mm_processor_kwargs structured_outputs request_id session_id return_tokens_as_token_ids".split(),
    *"return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text".split(),
    *"return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs".split(),
    *"repetition_detection stream_interval thinking_token_budget include_reasoning".split(),
    *"prompt_embeds response_format reasoning_effort".split(),
}
"""vLLM's own fields of completions and chats (main, November 2026)."""
DECIDED = {*openai_requests._NO_OP_VALUES, *openai_requests._LABELS}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(openai_requests._ChatFields, CHAT | VLLM), (openai_requests._TextFields, TEXT | VLLM)],
)
def test_every_request_field_of_openai_and_vllm_is_taken_or_refused(kind: Any, fields: set[str]) -> None:
    """A new field fails this test, so that we decide whether to support or refuse it."""
    own = {"chat_template_kwargs"}  # only for messages
    assert fields - own <= {*kind.model_fields, *DECIDED, "stream"}


def test_every_openai_message_and_content_part_is_taken_or_refused(api: openai.OpenAI) -> None:
    part = chat_types.ChatCompletionContentPartTextParam.__annotations__.keys() - {"type", "text"}
    assert part <= openai_requests._PART_LABELS
    user = chat_types.ChatCompletionUserMessageParam.__annotations__.keys()
    assert user == {"role", "content", "name"}


NOTHING: dict[str, list[Any]] = {
    "repetition_penalty": [1, 1.0],
    "min_p": [0, 0.0],
    "min_tokens": [0],
    "top_k": [-1, 0],
    "top_logprobs": [0],
    "logprobs": [0, False],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True, False],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "seed": [-1],
    "length_penalty": [1.0],
    "stop_token_ids": [[]],
    "priority": [0],
    "frequency_penalty": [0, 0.0],
    "tool_choice": ["none", "auto"],
    "prompt_cache_options": [{"mode": "implicit"}],
}


@pytest.mark.parametrize("ask", [chat, complete])
def test_accepts_openai_values_without_effect(
    house: House, api: openai.OpenAI, ask: Callable[..., Any]
) -> None:
    house.decode.remembers = False
    ask(api)
    plain = house.decode.jobs[-1].sampling
    for name, values in NOTHING.items():
        for value in values:
            assert ask(api, extra_body={name: value}).usage.completion_tokens == 5, name
            assert house.decode.jobs[-1].sampling == plain
    assert len({job.token_ids for job in house.group.jobs}) == 1
    nothing_left(house)


def test_accepts_cache_control_marks_and_names(house: House, api: openai.OpenAI) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    chat(api, [{"role": "user", "content": [part], "name": "Bob"}])
    chat(api, [{"role": "user", "content": [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}}]}])
    assert {bytes(job.token_ids[::4]) for job in house.group.jobs} == {b"[s:be nice][u:hi][a:"}


def test_answers_the_requests_of_public_benchmarks(house: House, address: str) -> None:
    """`vllm bench serve` with both backends, SGLang's bench_serving, and lm-eval's generate_until."""
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    content = [{"role": "user", "content": [{"type": "text", "text": "p"}]}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "p", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None,
                         **usage}),
        ("chat/completions", {"messages": content, "max_completion_tokens": 4, "ignore_eos": True, **usage}),
        ("completions", {"prompt": "p", "temperature": 0.0, "best_of": 1, "max_tokens": 4, "stream": True,
                         "ignore_eos": True}),
        ("completions", {"prompt": ["p"], "max_tokens": 4, "temperature": 0, "stop": ["\n\n"], "seed": 1234}),
    ]  # fmt: skip
    for path, body in bodies:
        answer = httpx.post(f"{address}/v1/{path}", json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            *events, last = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            assert last == "data: [DONE]" and any(chunk["choices"] for chunk in chunks)
            counted = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
            assert counted == ([4] if "stream_options" in body else [])
    nothing_left(house)


def test_add_special_tokens_adds_bos_as_in_vllm(house: House, api: openai.OpenAI) -> None:
    """By default a text gets a BOS and a rendered chat does not."""
    for ask, told, begins in (
        (complete, None, True), (complete, True, True), (complete, False, False),
        (chat, None, False), (chat, False, False), (chat, True, True),
    ):  # fmt: skip
        ask(api, extra_body={} if told is None else {"add_special_tokens": told})
        assert (house.group.jobs[-1].token_ids[:4] == (256).to_bytes(4, "little")) == begins


def test_prompt_rendered_by_a_template_gets_only_one_bos(model: Path, tmp_path: Path) -> None:
    """The tokenizer's post-processor adds BOS, as Llama 3's does, and so does the template."""
    raw = Tokenizer.from_file(str(model / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    raw.save(str(tmp_path / "tokenizer.json"))
    found = TextTokenizer.load(tmp_path)
    parse = SpecialTokens.PARSE
    assert found.encode("<bos>hi", add_bos=True, special_tokens=parse)[::4] == bytes([0, 0, 104, 105])
    once = found.encode("<bos>hi", add_bos=False, special_tokens=parse)
    assert [int.from_bytes(once[at : at + 4], "little") for at in (0, 4, 8)] == [256, 104, 105]
