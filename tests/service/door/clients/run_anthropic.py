"""Anthropic's Python client: messages, tools, streams, counts."""

from __future__ import annotations

import anthropic
from rows import ANSWER, ARGUMENTS, BASE, MODEL, PARAMETERS, QUESTION, case, main, refusal

client = anthropic.Anthropic(base_url=BASE, api_key="any", max_retries=0, timeout=60)
ASKED = [{"role": "user", "content": QUESTION}]
TOOLS = [{"name": "weather", "description": "It", "input_schema": PARAMETERS}]
SYSTEM = [{"type": "text", "text": "Be nice", "cache_control": {"type": "ephemeral"}}]


@case
def messages() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=200, messages=ASKED, system=SYSTEM)
    assert [block.text for block in answer.content] == [ANSWER] and answer.stop_reason == "end_turn"


@case
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=200, messages=ASKED) as streamed:
        assert "".join(streamed.text_stream) == ANSWER
        assert streamed.get_final_message().usage.output_tokens > 0


@case
def tools() -> None:
    asked = {"model": MODEL, "max_tokens": 300, "tools": TOOLS}
    first = client.messages.create(messages=ASKED, **asked)
    (used,) = first.content
    assert (used.input, first.stop_reason) == (ARGUMENTS, "tool_use")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sun"}
    said = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=[*ASKED, *said], **asked).content[0].text == ANSWER


@case
def streamed_tools() -> None:
    with client.messages.stream(model=MODEL, max_tokens=300, messages=ASKED, tools=TOOLS) as streamed:
        kinds = {event.type for event in streamed}
        (used,) = streamed.get_final_message().content
    assert used.input == ARGUMENTS and "input_json" in kinds


@case
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED, system="s", tools=TOOLS)
    assert counted.input_tokens > len(QUESTION)


@case
def images() -> str:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    asked = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    call = client.messages.create
    return refusal(lambda: call(model=MODEL, max_tokens=9, messages=asked), "'image' is not read here")


main()
