"""openai-agents: tools, handoffs and output types, by Responses and by chat."""

from __future__ import annotations

import openai
import pydantic
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from rows import ANSWER, ARGUMENTS, BASE, MODEL, QUESTION, case, main, weather

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any", max_retries=0, timeout=60)
RESPONSES = OpenAIResponsesModel(MODEL, client)
CHAT = OpenAIChatCompletionsModel(MODEL, client)


class Weather(pydantic.BaseModel):
    city: str
    days: int


def agent(model: object = RESPONSES, **more: object) -> Agent:
    return Agent(name="it", instructions="Be nice", model=model, **more)


@case
def tools() -> None:
    assert Runner.run_sync(agent(tools=[function_tool(weather)]), QUESTION).final_output == ANSWER


@case
def tools_by_chat() -> None:
    assert Runner.run_sync(agent(CHAT, tools=[function_tool(weather)]), QUESTION).final_output == ANSWER


@case
def output_type() -> None:
    assert Runner.run_sync(agent(output_type=Weather), QUESTION).final_output == Weather(**ARGUMENTS)


@case
def handoff() -> None:
    other = agent()
    other.name = "other"
    ended = Runner.run_sync(agent(handoffs=[other]), QUESTION)
    assert (ended.final_output, ended.last_agent.name) == (ANSWER, "other")


@case
def conversation() -> None:
    first = Runner.run_sync(agent(), QUESTION)
    again = Runner.run_sync(agent(), QUESTION, previous_response_id=first.last_response_id)
    assert again.final_output == ANSWER


main()
