"""llama-index's OpenAILike: chat, completions, an agent with tools, structured output."""

from __future__ import annotations

import asyncio

import pydantic
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from rows import ANSWER, ARGUMENTS, BASE, MODEL, QUESTION, case, main, weather

ASKED = [ChatMessage(role="user", content=QUESTION)]


class Weather(pydantic.BaseModel):
    """The weather."""

    city: str
    days: int


def model(**more: object) -> OpenAILike:
    known = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "timeout": 60}
    return OpenAILike(model=MODEL, api_base=f"{BASE}/v1", api_key="any", **{**known, **more})


@case
def chat_and_stream() -> None:
    assert model().chat(ASKED).message.content == ANSWER
    assert "".join(part.delta for part in model().stream_chat(ASKED)) == ANSWER


@case
def completions() -> None:
    plain = model(is_chat_model=False)
    assert plain.complete(QUESTION).text == ANSWER
    assert "".join(part.delta for part in plain.stream_complete(QUESTION)) == ANSWER


@case
def agent_with_tools() -> None:
    async def ran() -> object:
        return await FunctionAgent(tools=[weather], llm=model()).run(QUESTION)

    ended = asyncio.run(ran())
    (call,) = ended.tool_calls
    assert (call.tool_kwargs, call.tool_output.content) == (ARGUMENTS, weather(**ARGUMENTS))
    assert ended.response.content == ANSWER


@case
def structured_output() -> None:
    for by_schema in (True, False):
        bound = model(should_use_structured_outputs=by_schema).as_structured_llm(Weather)
        assert bound.chat(ASKED).raw == Weather(**ARGUMENTS), by_schema


main()
