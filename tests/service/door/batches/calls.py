"""Calls of OpenAI's client for batches."""

from __future__ import annotations

import json
from typing import Any

import openai

from ...inprocess import wait_until
from ..openai_calls import HI, MODEL

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, Any] = {
    CHAT: {"model": MODEL, "messages": HI, "max_tokens": 3},
    TEXT: {"model": MODEL, "prompt": "hi", "max_tokens": 3},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 3},
}
ENDED = ("completed", "failed", "expired", "cancelled")


def lines_of(*bodies: Any, endpoint: str = CHAT) -> bytes:
    lines = (
        {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    )
    return "\n".join(map(json.dumps, lines)).encode()


def begin(api: openai.OpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def until(api: openai.OpenAI, batch: Any, *statuses: str) -> Any:
    found: list[Any] = []

    def reached() -> bool:
        found[:] = [api.batches.retrieve(batch.id)]
        return found[0].status in statuses

    wait_until(reached, f"the batch is not {statuses}, but {found}")
    return found[0]


def answers(api: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of an output or error file by `custom_id`."""
    assert file_id is not None
    found = [json.loads(line) for line in api.files.content(file_id).text.splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "no line is answered twice"
    return by_id
