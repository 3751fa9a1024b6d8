"""instructor: typed answers by tools and by JSON schemas."""

from __future__ import annotations

import instructor
import openai
import pydantic
from rows import ARGUMENTS, BASE, MODEL, QUESTION, case, main

ASKED = [{"role": "user", "content": QUESTION}]


class Weather(pydantic.BaseModel):
    city: str
    days: int


def answered(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{BASE}/v1", api_key="any"), mode=mode)
    asked = {"model": MODEL, "messages": ASKED, "max_retries": 0}
    assert client.chat.completions.create(response_model=Weather, **asked).model_dump() == ARGUMENTS


@case
def tools() -> None:
    answered(instructor.Mode.TOOLS)


@case
def json_schema() -> None:
    answered(instructor.Mode.JSON_SCHEMA)


@case
def json_object() -> None:
    answered(instructor.Mode.JSON)


main()
