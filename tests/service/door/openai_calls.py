"""Calls of OpenAI's client for the tests of the HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

MODEL = "owner/tiny"
HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = "x" * 500
JSON = {"content-type": "application/json"}
Open = Callable[..., openai.OpenAI]
"""Makes a client without retries from an address and a bearer token."""


def chat(api: openai.OpenAI, messages: list[Any] = HI, **options: Any) -> Any:
    return api.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 5, **options})


def complete(api: openai.OpenAI, prompt: Any = "p", **options: Any) -> Any:
    return api.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 5, **options})
