"""Structured outputs through OpenAI's client and ours: JSON, choices, regexes, grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import InvalidArgument
from deltafront.workers.messages.events import FinishReason, Token

from ..inprocess import House
from .openai_calls import HI, MODEL, Open, chat, complete


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[a-z]{1,9}$")
    age: int = pydantic.Field(ge=0, le=150)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "tags": {"enum": ["a", "bb"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_openais_client_parses_an_answer_into_its_type(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(model=MODEL, messages=HI, max_tokens=99, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_streamed_json_equals_the_unstreamed_answer(api: openai.OpenAI) -> None:
    asked = {"response_format": of_schema(SCHEMA), "max_tokens": 99}
    whole = chat(api, **asked).choices[0].message.content
    jsonschema.validate(json.loads(whole), SCHEMA)
    chunks = list(chat(api, stream=True, **asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole


def test_response_format_json_object_begins_with_a_brace(api: openai.OpenAI) -> None:
    assert chat(api, response_format={"type": "json_object"}).choices[0].message.content[0] == "{"


def test_json_object_with_llama_cpps_schema_is_constrained_by_it(api: openai.OpenAI) -> None:
    asked = {"type": "json_object", "schema": {"const": 42}}
    assert chat(api, response_format=asked, max_tokens=9).choices[0].message.content == "42"


def test_response_format_text_does_not_constrain_the_answer(api: openai.OpenAI, house: House) -> None:
    chat(api, response_format={"type": "text"})
    assert not house.decode.reservations[-1].options.constraint


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"choice": ["yes", 'no "more"']}, 'yes|no "more"'),
        ({"regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"grammar": 'root ::= "x" [0-4] "y"'}, "x[0-4]y"),
        ({"grammar": 'start: "x" /[0-4]/'}, "x[0-4]"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 7}}, "[5-7]"),
        ({"json": '{"const": 3}', "disable_any_whitespace": False}, "3"),
    ],
)
def test_answer_matches_vllms_structured_outputs_field(api: openai.OpenAI, given: Any, pattern: str) -> None:
    answer = complete(api, max_tokens=50, extra_body={"structured_outputs": given})
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or"),
        ({"response_format": of_schema(3)}, "response_format.json_schema.schema", "must be a JSON schema"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", "must be a"),
        ({"response_format": of_schema({"type": "objekt"})}, "response_format", "Invalid type: objekt"),
        ({"response_format": of_schema({"enum": ["x" * 300_000]})}, "response_format", "at most 262144"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "b"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must be a list of texts"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must have one of"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "contradicts response_format",
        ),
    ],
)
def test_refuses_a_wrong_schema_before_prefill(
    api: openai.OpenAI, house: House, given: Any, param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(api, extra_body=given)
    body: Any = refused.value.body
    assert body["param"] == param and said in body["message"] and "\n" not in body["message"]
    assert not house.group.jobs and not house.decode.reservations


def thinking(api: openai.OpenAI, mood: str, **asked: Any) -> Any:
    told = {"chat_template_kwargs": {"mood": mood}, "skip_cache": True, **asked.pop("extra_body", {})}
    return chat(api, max_tokens=200, extra_body=told, **asked).choices[0].message


@pytest.mark.parametrize(("mood", "opening"), [("<think>", ""), ("", "<think>")])
def test_reasoning_is_not_constrained_by_the_answers_schema(
    make_house: Callable[..., House], make_http: Any, connect: Open, mood: str, opening: str
) -> None:
    house = make_house(model_name=MODEL, reasoning="think")
    api = connect(make_http(house))
    house.decode.script = [*f"{opening}Hm {{</think>\n\nno form".encode()]
    message = thinking(api, mood, response_format=of_schema(SCHEMA))
    assert message.reasoning == "Hm {"
    jsonschema.validate(json.loads(message.content), SCHEMA)
    message = thinking(api, mood, extra_body={"structured_outputs": {"choice": ["yes", "nay"]}})
    assert (message.reasoning, message.content) == ("Hm {", "nay")
    house.decode.fail_after = [len(opening) + 16]
    assert thinking(api, mood, response_format=of_schema(SCHEMA)).reasoning == "Hm {"
    assert house.decode.jobs[-1].answered_tokens == len(opening) + 16


def test_schema_applies_at_once_if_the_template_permits_no_reasoning(
    make_house: Callable[..., House], make_http: Any, connect: Open
) -> None:
    house = make_house(model_name=MODEL, reasoning="think")
    api = connect(make_http(house))
    house.decode.script = [*b"<think>Hm</think>"]
    for mood in ("<think></think>", ""):
        message = thinking(api, mood, response_format=of_schema(SCHEMA))
        assert hasattr(message, "reasoning") == (not mood)
        jsonschema.validate(json.loads(message.content), SCHEMA)


def test_error_asks_to_simplify_a_schema_whose_grammar_is_too_large(api: openai.OpenAI, house: House) -> None:
    house.decode.fail_after, house.decode.failure = [4], FinishReason.GRAMMAR
    chunks = chat(api, response_format=of_schema(SCHEMA), max_tokens=99, stream=True)
    with pytest.raises(openai.APIError, match="simplify its schema or tools"):
        list(chunks)
    assert len(house.decode.jobs) == 1, "it is not tried again"


def test_answer_keeps_its_schema_after_a_worker_failure(api: openai.OpenAI, house: House) -> None:
    asked = {"response_format": of_schema(SCHEMA), "max_tokens": 99}
    whole = chat(api, **asked).choices[0].message.content
    house.decode.fail_after = [4]
    assert chat(api, **asked).choices[0].message.content == whole
    assert house.decode.jobs[-1].answered_tokens == 4


def test_grpc_client_asks_for_a_schema(house: House, client: DeltafrontClient) -> None:
    events = list(client.generate("p", json_schema=SCHEMA, max_tokens=99))
    text = "".join(event.text for event in events if isinstance(event, Token))
    jsonschema.validate(json.loads(text), SCHEMA)
    with pytest.raises(InvalidArgument, match=r"constraint\.regex"):
        list(client.generate("p", regex="(a"))
    with pytest.raises(InvalidArgument, match="one schema, regex, grammar or choice"):
        list(client.generate("p", regex="a", grammar='start: "a"'))
