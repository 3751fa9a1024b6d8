"""Log-probabilities in OpenAI's formats, whole and streamed, and in gRPC's tokens."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.door.openai.logprobs import ChatLogprobs, TextLogprobs
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.workers.messages.events import Token, TokenLogprob

from ..inprocess import House
from .openai_calls import chat, complete


def test_chat_logprobs_list_every_token_and_its_top_alternatives(house: House, api: openai.OpenAI) -> None:
    house.decode.script = list("ab€".encode())
    answer = chat(api, logprobs=True, top_logprobs=2).choices[0]
    entries = answer.logprobs.content
    assert [entry.token for entry in entries[:4]] == ["a", "b", "bytes:\\xe2", "bytes:\\x82"]
    assert b"".join(bytes(entry.bytes) for entry in entries) == answer.message.content.encode()
    assert {entry.logprob for entry in entries} == {-0.5}
    top = entries[0].top_logprobs
    assert [(one.token, one.bytes, one.logprob) for one in top] == [("a", [97], -0.5), ("b", [98], -1.5)]
    assert chat(api, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(api).choices[0].logprobs is None


def test_tokens_within_one_character_share_its_text_offset(house: House, api: openai.OpenAI) -> None:
    house.decode.script = list("x€yé".encode())
    found = complete(api, max_tokens=7, logprobs=2).choices[0]
    assert found.text == "x€yé"
    assert found.logprobs.text_offset == [0, 1, 1, 1, 2, 3, 3]
    assert found.logprobs.tokens[0] == "x" and found.logprobs.tokens[4] == "y"
    assert found.logprobs.token_logprobs == [-0.5] * 7
    assert found.logprobs.top_logprobs[0] == {"x": -0.5, "y": -1.5}
    none = complete(api, max_tokens=2, logprobs=0).choices[0].logprobs
    assert none.top_logprobs == [{"x": -0.5}, {"bytes:\\xe2": -0.5}]


@pytest.mark.parametrize("stop", [[], ["yz"]])
def test_streamed_logprobs_equal_the_whole_answers(house: House, api: openai.OpenAI, stop: Any) -> None:
    house.decode.script = list("x€y€yz".encode())
    asked: dict[str, Any] = {"max_tokens": 11, "stop": stop}
    whole = complete(api, logprobs=1, **asked).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in complete(api, logprobs=1, stream=True, **asked)]
    parts = [part for part in chunks if part is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)
    talk: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, **asked}
    content = chat(api, **talk).choices[0].logprobs.content
    streamed = [chunk.choices[0].logprobs for chunk in chat(api, stream=True, **talk)]
    assert [entry for part in streamed if part for entry in part.content] == content


def test_end_token_has_an_entry_and_no_text(house: House, api: openai.OpenAI) -> None:
    house.decode.script = [97, 257]
    found = complete(api, logprobs=0).choices[0]
    assert (found.text, found.logprobs.tokens, found.logprobs.text_offset) == ("a", ["a", "<eos>"], [0, 1])


def test_grpc_tokens_include_top_logprobs(client: DeltafrontClient) -> None:
    tokens = [e for e in client.generate("p", max_tokens=3, top_logprobs=2) if isinstance(e, Token)]
    assert [len(token.top) for token in tokens] == [2, 2, 2]
    assert tokens[0].top[0] == TokenLogprob(token_id=tokens[0].token_id, logprob=-0.5)
    assert not any(e.top for e in client.generate("p", max_tokens=3) if isinstance(e, Token))


def test_resumed_answer_has_each_tokens_logprob_exactly_once(house: House, api: openai.OpenAI) -> None:
    house.decode.fail_after = [2]
    answer = chat(api, logprobs=True).choices[0]
    assert "".join(entry.token for entry in answer.logprobs.content) == answer.message.content


def test_token_of_probability_0_has_logprob_minus_9999(house: House) -> None:
    token_bytes: TokenBytes = house.door._requests.token_bytes
    token = Token(index=0, token_id=97, logprob=-1.0, top=(TokenLogprob(token_id=98, logprob=-float("inf")),))
    for kind in (ChatLogprobs, TextLogprobs):
        made = kind(token_bytes, 1)
        made.add(token)
        assert "-9999.0" in str(made.take()) and made.take() is None


def test_fault_in_a_streams_chunk_ends_it_with_an_error_event(
    house: House, api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatLogprobs, "add", lambda *_: 1 / 0)
    with pytest.raises(openai.APIError, match="the service failed; its log says why"):
        list(chat(api, stream=True, logprobs=True))
