"""How a chat's messages end before the answer: `add_generation_prompt`, `continue_final_message`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from deltafront.service.request.calls import Ending
from deltafront.service.request.text.tokenizer import TextTokenizer

from ..inprocess import TEMPLATE, House
from .openai_calls import HI, chat

TALK: list[Any] = [*HI, {"role": "assistant", "content": "well, I"}]


def prompt(house: House) -> bytes:
    return bytes(house.group.jobs[-1].token_ids[::4])


def test_chat_adds_a_generation_prompt_unless_told_otherwise(house: House, api: openai.OpenAI) -> None:
    chat(api)
    assert prompt(house) == b"[s:be nice][u:hi][a:"
    chat(api, extra_body={"add_generation_prompt": False})
    assert prompt(house) == b"[s:be nice][u:hi]"


def test_answer_continues_the_final_message(house: House, api: openai.OpenAI) -> None:
    told = {"continue_final_message": True, "add_generation_prompt": False}
    chat(api, TALK, extra_body=told)
    assert prompt(house) == b"[s:be nice][u:hi][a:well, I"
    chat(api, TALK, extra_body=told, n=2)
    assert bytes(house.group.jobs[-1].token_ids[::4]) == b"[s:be nice][u:hi][a:well, I"
    chat(api, TALK, extra_body={**told, "session_ttl_s": 60})
    assert prompt(house) == b"[s:be nice][u:hi][a:well, I"


def test_control_token_in_a_continued_message_is_text(house: House, api: openai.OpenAI) -> None:
    told = {"continue_final_message": True, "add_generation_prompt": False}
    chat(api, [*HI, {"role": "assistant", "content": "a <eos> b"}], extra_body=told)
    assert prompt(house) == b"[s:be nice][u:hi][a:a <eos> b"


@pytest.mark.parametrize("last", ["well", "well ", " well\n", "hi", "[u:hi]"])
def test_continued_conversations_end_as_in_transformers(model: Path, last: str) -> None:
    messages = [*HI, {"role": "assistant", "content": last}]
    text = TextTokenizer.load(model).with_ending(Ending.OPEN)
    (wanted,), _ = render_jinja_template([messages], chat_template=TEMPLATE, continue_final_message=True)
    assert text.encode_chat(messages)[::4].decode() == wanted
