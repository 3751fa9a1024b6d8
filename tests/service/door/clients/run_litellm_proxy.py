"""litellm's proxy server, which passes on what OpenAI's client and Anthropic's API ask of it."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

import httpx
import openai
from rows import ANSWER, ARGUMENTS, BASE, MODEL, PARAMETERS, QUESTION, case, main, refusal
from server import free_port, serving

NAME = "routed"
ROUTE = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": "any"}
ASKED = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
KEY = f"sk-{secrets.token_hex(32)}"
"""The proxy does not start without one."""
PORT = free_port()
PROXY = f"http://127.0.0.1:{PORT}"
client = openai.OpenAI(base_url=f"{PROXY}/v1", api_key=KEY, max_retries=0, timeout=60)
create = client.chat.completions.create


@case
def models() -> None:
    assert [model.id for model in client.models.list()] == [NAME]


@case
def chat_and_stream() -> None:
    answer, chunks = create(**ASKED), create(**ASKED, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert answer.choices[0].message.content == said == ANSWER
    assert answer.usage.completion_tokens > 0


@case
def tools() -> None:
    first = create(**ASKED, tools=TOOLS).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    again = create(model=NAME, messages=[*ASKED["messages"], first, result], tools=TOOLS)
    assert again.choices[0].message.content == ANSWER


@case
def streamed_tools() -> None:
    with client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
        stream.until_done()
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS


@case
def responses() -> None:
    assert client.responses.create(model=NAME, input=QUESTION).output_text == ANSWER


@case
def messages() -> None:
    asked, key = {**ASKED, "max_tokens": 200}, {"x-api-key": KEY}
    answer = httpx.post(f"{PROXY}/v1/messages", json=asked, headers=key, timeout=60).json()
    assert [block["text"] for block in answer["content"]] == [ANSWER], answer


@case
def too_long() -> str:
    asked = [{"role": "user", "content": "x" * 140_000}]
    return refusal(lambda: create(model=NAME, messages=asked), "ContextWindowExceededError")


with tempfile.TemporaryDirectory() as home:
    config = Path(home) / "config.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": NAME, "litellm_params": ROUTE}]}))
    program = Path(sys.executable).with_name("litellm")
    command = [program, "--config", config, "--host", "127.0.0.1", "--port", str(PORT)]
    offline = {**os.environ, "HOME": home, "LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with serving(command, f"{PROXY}/health/liveliness", offline):
        main()
