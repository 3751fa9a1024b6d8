"""OpenAI's Python client: chat, Responses, tools, parsed answers, batches."""

from __future__ import annotations

import json
import time

import openai
import pydantic
from rows import ANSWER, ARGUMENTS, BASE, MODEL, PARAMETERS, QUESTION, case, main, refusal

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="any", max_retries=0, timeout=60)
ASKED = [{"role": "user", "content": QUESTION}]
FUNCTION = {"name": "weather", "description": "It", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = [{"type": "function", **FUNCTION}]


class Weather(pydantic.BaseModel):
    city: str
    days: int


@case
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@case
def chat_and_stream() -> None:
    said = client.chat.completions.create(model=MODEL, messages=ASKED).choices[0].message.content
    chunks = client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
    assert said == ANSWER == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@case
def chat_with_tools() -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    again = client.chat.completions.create(model=MODEL, messages=[*ASKED, first, result], tools=TOOLS)
    assert again.choices[0].message.content == ANSWER


@case
def streamed_tools() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as stream:
        stream.until_done()
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS


@case
def chat_parse() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(**ARGUMENTS)


@case
def responses_and_stream() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION)
    with client.responses.stream(model=MODEL, input=QUESTION, previous_response_id=first.id) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert first.output_text == final.output_text == ANSWER
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert client.responses.retrieve(final.id).output_text == ANSWER


@case
def responses_with_tools() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, tools=FLAT)
    (call,) = first.output
    assert json.loads(call.arguments) == ARGUMENTS
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    asked = {"model": MODEL, "input": result, "tools": FLAT, "previous_response_id": first.id}
    assert client.responses.create(**asked).output_text == ANSWER


@case
def responses_parse() -> None:
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather)
    assert parsed.output_parsed == Weather(**ARGUMENTS)


@case
def batch_of_chats() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    content = json.dumps({**line, "body": {"model": MODEL, "messages": ASKED}}).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < until, batch
        time.sleep(0.1)
    answer = json.loads(client.files.content(batch.output_file_id).text)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert [one.id for one in client.batches.list()] == [batch.id]
    assert client.files.delete(file.id).deleted


@case
def hosted_tools() -> str:
    search = [{"type": "web_search"}]
    return refusal(lambda: client.responses.create(model=MODEL, input="a", tools=search), "'web_search'")


@case
def embeddings() -> str:
    return refusal(lambda: client.embeddings.create(model=MODEL, input="a"), "makes no embeddings")


main()
