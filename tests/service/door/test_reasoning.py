"""Reasoning is separated from content: through OpenAI's client, and with real vocabularies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from deltafront.service.config import ConfigError
from deltafront.service.door.reasoning import ReasoningSplitter
from deltafront.service.request.answers import AnswerPart
from deltafront.service.request.text.detokenize import AnswerText, Detokenizer
from deltafront.service.request.text.thoughts import is_open
from deltafront.workers.model.weights.gguf.tokenizer import tokenizer_json

from ...workers.vocabularies import FAMILIES, Metadata
from ..fakes import EOS
from ..inprocess import House, settings, write_model
from .openai_calls import HI, MODEL, Open, chat, complete

ANSWERS = [
    (False, "<think>\nHm <b> é🙂\n</think>\n\nYes.", AnswerPart("\nHm <b> é🙂\n", "\n\nYes.")),
    (False, "\n<think>a</think>b", AnswerPart("a", "b")),
    (True, "\nHm</thin k</think>Yes", AnswerPart("\nHm</thin k", "Yes")),
    (True, "cut short </thi", AnswerPart("cut short </thi", "")),
    (False, "<think>cut short", AnswerPart("cut short", "")),
    (False, "Yes <think>no</think>", AnswerPart("", "Yes <think>no</think>")),
    (False, " <thing", AnswerPart("", " <thing")),
    (False, "<think", AnswerPart("", "<think")),
    (False, "", AnswerPart("", "")),
    (True, "a</think>b</think>", AnswerPart("a", "b</think>")),
]


def joined(opened: bool, pieces: list[str]) -> AnswerPart:
    splitter = ReasoningSplitter(opened)
    parts = [*(splitter.push(piece, 0) for piece in pieces), splitter.flush()]
    return AnswerPart("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(("opened", "text", "told"), ANSWERS)
def test_splits_reasoning_from_content_at_any_chunk_boundary(
    opened: bool, text: str, told: AnswerPart
) -> None:
    assert joined(opened, list(text)) == told
    for cuts in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        edges = [0, *cuts, len(text)]
        assert joined(opened, [text[a:b] for a, b in itertools.pairwise(edges)]) == told


def test_text_that_begins_no_marker_is_not_held_back() -> None:
    splitter = ReasoningSplitter(opened=True)
    assert [splitter.push(piece, 0) for piece in ("a<", "b", "</think>", "<")] == [
        AnswerPart("a"), AnswerPart("<b"), AnswerPart(), AnswerPart(content="<"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("", False), ("<a>", False), ("<a><think>\n", True), ("<a><think>\n\n</think>\n\n", False)],
)
def test_chat_template_may_write_the_opening_think_marker(prompt: str, opened: bool) -> None:
    assert is_open(prompt) == opened


@pytest.mark.parametrize("name", ["qwen_2", "deepseek"])
def test_real_tokenizers_decode_the_think_markers(name: str) -> None:

    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(Metadata(FAMILIES[name]().metadata))))
    for _, text, _ in ANSWERS:
        answer = AnswerText(Detokenizer(tokenizer), ())
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = [answer.push(id_).text for id_ in ids] + [answer.flush().text]
        for opened in (False, True):
            assert joined(opened, pieces) == joined(opened, [text])


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house(model_name=MODEL, reasoning="think")


def streamed(api: openai.OpenAI, **options: Any) -> tuple[AnswerPart, Any]:
    """Return the streamed texts, and the usage at the end."""
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = chat(api, max_tokens=99, stream=True, **usage, **options)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return AnswerPart(reasoning, "".join(delta.content or "" for delta in deltas)), last.usage


def tokens_of_reasoning(opened: bool, text: str) -> int:
    """Count the tokens of reasoning including its end marker. Each byte is a token."""
    if not opened and not text.lstrip().startswith("<think>"):
        return 0
    reasoning, close, _ = text.partition("</think>")
    return len((reasoning + close).encode()) + (not close)


@pytest.mark.parametrize(("opened", "text", "told"), ANSWERS)
def test_chat_answer_has_reasoning_besides_content(
    house: House, api: openai.OpenAI, opened: bool, text: str, told: AnswerPart
) -> None:
    house.decode.script = [*text.encode(), EOS]
    options = {"extra_body": {"chat_template_kwargs": {"mood": "<think>\n" if opened else "<think></think>"}}}
    done = chat(api, max_tokens=99, **options)
    message = done.choices[0].message
    assert AnswerPart(getattr(message, "reasoning_content", ""), message.content) == told
    assert getattr(message, "reasoning", "") == told.reasoning
    found, usage = streamed(api, **options)
    assert found == told and usage == done.usage
    assert done.usage.completion_tokens_details.reasoning_tokens == tokens_of_reasoning(opened, text)
    assert done.usage.completion_tokens == len(text.encode()) + 1
    back = {"role": "assistant", "content": told.content, "reasoning_content": told.reasoning}
    back["reasoning"] = told.reasoning
    chat(api, [*HI, back, *HI])


def test_stop_strings_and_max_tokens_apply_to_reasoning(house: House, api: openai.OpenAI) -> None:
    house.decode.script = list(b"<think>ab STOP</think>c")
    done = chat(api, stop="STOP", max_tokens=99)
    assert (done.choices[0].message.reasoning_content, done.choices[0].finish_reason) == ("ab ", "stop")
    cut = chat(api, max_tokens=8)
    assert (cut.choices[0].message.reasoning_content, cut.choices[0].finish_reason) == ("a", "length")
    assert complete(api, max_tokens=8).choices[0].text == "<think>a"


def test_stream_counts_reasoning_tokens_so_far(house: House, api: openai.OpenAI) -> None:
    house.decode.script = [*b"<think>ab</think>cd", EOS]
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in chat(api, max_tokens=99, stream=True, stream_options=options)]
    counts = [(one.completion_tokens, one.completion_tokens_details.reasoning_tokens) for one in usages]
    assert counts == [(0, 0), (8, 8), (9, 9), (18, 17), (19, 17), (20, 17), (20, 17)]


def test_start_refuses_a_marker_that_decodes_to_no_text(
    tmp_path: Path, make_house: Callable[..., House]
) -> None:
    model = write_model(tmp_path / "special")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["</think>"])
    tokenizer.save(str(model / "tokenizer.json"))
    make_house(settings(model))
    with pytest.raises(ConfigError, match=r"door.reasoning = think: .*special token"):
        make_house(settings(model, reasoning="think"))


def test_reasoning_is_returned_as_content_unless_configured(
    make_house: Callable[..., House], make_http: Callable[..., str], connect: Open
) -> None:
    house = make_house(model_name=MODEL)
    house.decode.script = [*b"<think>a</think>b", EOS]
    told, usage = streamed(connect(make_http(house)))
    assert told == AnswerPart("", "<think>a</think>b") and usage.completion_tokens_details is None
