"""Any JSON value at any place of a body: the answer is no 5xx, in every protocol over HTTP."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..inprocess import HANG_S, House, settings
from .openai_calls import JSON, MODEL
from .test_tools import model_with_tools

ALWAYS = ('[["a"]]', '{"type": {}}')
"""No keys of a map, unlike other values."""
IN_TURN = (
    "null", "true", "0", "-1", "1e999", "0.5", "1" * 400, "NaN", '""', '"\\ud800"', '"a"', "[]", "[null]",
    "{}", '{"a": [1]}', f'"{"x" * 3000}"', "[" * 150 + "]" * 150,
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x"]}, "b": {"anyOf": [{"type": "string"}]}},
    "required": ["a"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
ARGUMENTS = '{"a": "x"}'
OWN = {"method": "dense", "options": {}, "cache_salt": "s", "retain_s": 1, "timeout_s": 9, "skip_cache": True}
SAMPLING = {
    "temperature": 1, "top_p": 1, "seed": 1, "stop": ["z"], "top_k": 1, "min_p": 0, "min_tokens": 0,
    "stop_token_ids": [1], "logit_bias": {"1": 1}, "frequency_penalty": 0, "repetition_penalty": 1,
    "ignore_eos": False,
}  # fmt: skip
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
TEXTS = [{"type": "text", "text": "hi"}]
CACHED = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": TEXTS},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "content": "sun", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": FORM, "chat_template_kwargs": {"a": 1}, "logprobs": True, "top_logprobs": 1,
        "stream_options": {"include_usage": True}, "stream": True, "n": 1, "max_tokens": 1, **OWN, **SAMPLING,
    },
    "/v1/completions": {
        "prompt": [1, 2], "logprobs": 1, "structured_outputs": {"choice": ["a"]}, "max_tokens": 1, **SAMPLING,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c", "output": "sun"},
            {"type": "reasoning", "summary": []},
        ],
        "instructions": "i", "store": True, "metadata": {"a": "b"},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low"}, "include": ["a"],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "stream_options": {"include_obfuscation": False}, "max_output_tokens": 1, "stream": True, **OWN,
    },
    "/v1/messages": {
        "system": [CACHED],
        "messages": [
            {"role": "user", "content": [CACHED]},
            {"role": "assistant", "content": [USED]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXTS}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "x"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled"}, "context_management": {"edits": [{"type": "clear_thinking_x"}]},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stop_sequences": ["z"], "metadata": {}, "max_tokens": 1, "stream": True, **OWN,
    },
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
MARK = "\N{ASTERISM}"


def marked(value: Any) -> Iterator[Any]:
    """Yield the value with a mark in the place of each value inside it, and of itself."""
    yield MARK
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        for other in marked(inner):
            changed = copy.copy(value)
            changed[key] = other
            yield changed


def wrong_bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield bodies, each with a wrong value, and the field that has it."""
    turn = itertools.cycle(IN_TURN)
    for field, right in BODIES[path].items():
        for value in marked(right):
            body = {**BODIES[path], field: value, "model": MODEL}
            text = json.dumps(body, ensure_ascii=False)
            for wrong in (*ALWAYS, *itertools.islice(turn, 2)):
                yield field, text.replace(f'"{MARK}"', wrong).encode()


@pytest.mark.parametrize("path", BODIES)
def test_refuses_a_wrongly_typed_value_by_the_path_of_its_field(
    make_house: Callable[..., House], make_http: Any, tmp_path: Path, path: str
) -> None:
    model = model_with_tools(tmp_path / "calls")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] += "{# <parameter= #}"  # Qwen3-Coder's format reads the most of a schema
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    address = make_http(make_house(settings(model, model_name=MODEL, reasoning="think")))
    refused = 0
    with httpx.Client(base_url=address, headers=JSON, timeout=HANG_S) as client:
        for field, body in wrong_bodies(path):
            answer = client.post(path, content=body)
            sent = body.decode()[-2000:]
            assert answer.status_code < 500, sent
            if answer.status_code != 200:
                message = answer.json()["error"]["message"]
                assert (field in message or "not JSON" in message) and "\n" not in message, sent
                refused += 1
            else:
                assert b"internal_error" not in answer.content and b"api_error" not in answer.content
    assert refused > 5
