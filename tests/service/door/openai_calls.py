"""What the tests of the HTTP edge ask through OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

MODEL = "owner/tiny"
HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = "x" * 500
JSON = {"content-type": "application/json"}
Open = Callable[..., openai.OpenAI]
"""(address, token) → a client that never tries again."""


def chat(api: openai.OpenAI, messages: list[Any] = HI, **options: Any) -> Any:
    return api.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 5, **options})


def complete(api: openai.OpenAI, prompt: Any = "p", **options: Any) -> Any:
    return api.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 5, **options})
