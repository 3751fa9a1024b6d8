"""Answers without faults, for comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deltafront.service.client import Token

from .checks import Reference
from .running import Service
from .schedule import MAX_TOKENS, OPTIONS, PROMPTS, Ask, Form, prompt, question

Key = tuple[int, Form]
"""A prompt, and the kind of its answer: greedy, sampled, with a sparse method, or to a question."""
EVERY_KEY = tuple(
    (number, form)
    for number in range(PROMPTS)
    for form in (Form.GREEDY, Form.SAMPLED, Form.SPARSE, Form.SESSION)
)


def key_of(ask: Ask) -> Key:
    """Return the key of the answer without faults."""
    own = ask.form in (Form.SAMPLED, Form.SPARSE, Form.SESSION)
    return ask.prompt, ask.form if own else Form.GREEDY


def references(service: Service, keys: Iterable[Key] = EVERY_KEY) -> dict[Key, Reference]:
    """Collect the answers of a service without faults."""
    found: dict[Key, Reference] = {}
    with service.client() as client:
        for number, form in keys:
            options: dict[str, Any] = {"method": "dense"} | OPTIONS.get(form, {})
            options |= {"append": question(number)} if form is Form.SESSION else {}
            ids, texts = list[int](), list[str]()
            for event in client.generate(prompt(number), max_tokens=MAX_TOKENS, ignore_eos=True, **options):
                if isinstance(event, Token):
                    ids.append(event.token_id)
                    texts.append((texts[-1] if texts else "") + event.text)
            found[number, form] = Reference(ids, texts)
    return found
