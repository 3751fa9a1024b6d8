"""langchain-openai: an agent with tools, structured output, Responses."""

from __future__ import annotations

import pydantic
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from rows import ANSWER, ARGUMENTS, BASE, MODEL, QUESTION, case, main, weather

ASKED = {"messages": [{"role": "user", "content": QUESTION}]}


class Weather(pydantic.BaseModel):
    """The weather."""

    city: str
    days: int


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key="any", max_retries=0, timeout=60, **more)


@case
def invoke_and_stream() -> None:
    assert model().invoke(QUESTION).content == ANSWER
    assert "".join(chunk.content for chunk in model().stream(QUESTION)) == ANSWER


@case
def agent_with_tools() -> None:
    *_, call, result, last = create_agent(model(), [weather]).invoke(ASKED)["messages"]
    assert call.tool_calls[0]["args"] == ARGUMENTS and last.content == ANSWER
    assert result.content == weather(**ARGUMENTS)


@case
def agent_by_responses() -> None:
    agent = create_agent(model(use_responses_api=True), [weather])
    assert agent.invoke(ASKED)["messages"][-1].text == ANSWER


@case
def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        bound = model().with_structured_output(Weather, method=method)
        assert bound.invoke(QUESTION) == Weather(**ARGUMENTS), method


main()
