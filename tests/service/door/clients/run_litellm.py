"""litellm with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json

import litellm
from rows import ANSWER, ARGUMENTS, BASE, MODEL, PARAMETERS, QUESTION, case, main, refusal

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": "any", "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": BASE, "api_key": "any", "max_tokens": 300}
ASKED = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def check(asked: dict) -> None:
    first = litellm.completion(messages=ASKED, tools=TOOLS, **asked).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    answer = litellm.completion(messages=[*ASKED, first.model_dump(), result], tools=TOOLS, **asked)
    assert answer.choices[0].message.content == ANSWER


@case
def stream() -> None:
    chunks = litellm.completion(messages=ASKED, stream=True, **OPENAI)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


@case
def tools() -> None:
    check(OPENAI)


@case
def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS}}
    answer = litellm.completion(messages=ASKED, response_format=form, **OPENAI)
    assert json.loads(answer.choices[0].message.content) == ARGUMENTS


@case
def responses() -> None:
    answer = litellm.responses(input=QUESTION, **OPENAI)
    assert answer.output[0].content[0].text == ANSWER


@case
def tools_by_messages() -> None:
    check(ANTHROPIC)


@case
def too_long() -> str:
    asked = [{"role": "user", "content": "x" * 140_000}]
    return refusal(lambda: litellm.completion(messages=asked, **OPENAI), "ContextWindowExceededError")


main()
