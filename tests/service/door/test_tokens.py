"""vLLM's /tokenize and /detokenize, and paths that are refused in words."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from ..inprocess import HANG_S, House
from .openai_calls import HI, MODEL, chat
from .test_tools import prompt_of


def post(address: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(address + path, json=body, timeout=HANG_S)


def test_detokenize_restores_the_text_given_to_tokenize(address: str) -> None:
    answer = post(address, "/tokenize", model=MODEL, prompt="hé<eos>", return_token_strs=True).json()
    assert answer["tokens"] == [256, *"hé".encode(), 257]
    assert (answer["count"], answer["max_model_len"]) == (5, 8192)
    assert answer["token_strs"][0] == "<bos>" and answer["token_strs"][-1] == "<eos>"
    assert post(address, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "<bos>hé<eos>"}
    bare = post(address, "/tokenize", prompt="a", add_special_tokens=False).json()
    assert (bare["tokens"], bare["token_strs"]) == ([97], None)
    assert post(address, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokenize_of_messages_equals_the_chat_prompt(address: str, api: openai.OpenAI, house: House) -> None:
    chat(api)
    tokens = post(address, "/tokenize", messages=HI).json()["tokens"]
    assert bytes(tokens).decode() == prompt_of(house)
    short = post(address, "/tokenize", messages=HI, add_generation_prompt=False).json()["tokens"]
    assert bytes(short).decode() == prompt_of(house).removesuffix("[a:")
    assert len(house.group.jobs) == 1, "nothing ran for them"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "prompt: give a prompt, or messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "give a prompt, or messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "'other' is not served here"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content: must be text"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "is not supported"),
        ("/detokenize", {"tokens": [-1]}, "tokens: -1 is no token id"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]: must be"),
        ("/detokenize", {"tokens": [1] * 8193}, "tokens: has 8193 tokens: at most 8192"),
        ("/v1/embeddings", {}, "makes no embeddings"),
        ("/v1/audio/speech", {}, "no audio"),
        ("/v1/images/generations", {}, "no images"),
    ],
)
def test_tokenize_refuses_wrong_bodies_and_paths_with_the_reason(
    address: str, path: str, body: Any, said: str
) -> None:
    answer = post(address, path, **body)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]
