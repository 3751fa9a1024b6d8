"""pydantic-ai: tools and output types, by chat and by Responses."""

from __future__ import annotations

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import ANSWER, ARGUMENTS, BASE, MODEL, QUESTION, case, main, weather

PROVIDER = OpenAIProvider(base_url=f"{BASE}/v1", api_key="any")
CHAT, RESPONSES = OpenAIChatModel(MODEL, provider=PROVIDER), OpenAIResponsesModel(MODEL, provider=PROVIDER)


class Weather(pydantic.BaseModel):
    city: str
    days: int


@case
def tools() -> None:
    assert Agent(CHAT, tools=[weather]).run_sync(QUESTION).output == ANSWER


@case
def output_type() -> None:
    assert Agent(CHAT, output_type=Weather).run_sync(QUESTION).output == Weather(**ARGUMENTS)


@case
def native_output() -> None:
    assert Agent(CHAT, output_type=NativeOutput(Weather)).run_sync(QUESTION).output == Weather(**ARGUMENTS)


@case
def tools_by_responses() -> None:
    assert Agent(RESPONSES, tools=[weather]).run_sync(QUESTION).output == ANSWER


main()
