"""What the Python client sends, and what it refuses to send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltafront.service.client import DeltafrontClient, InvalidArgument, Unavailable

from ..test_requests import collect, expected, ids


@pytest.mark.parametrize(
    "given", [[65, np.int64(66), 67], list(np.array([65, 66, 67])), np.array([65, 66, 67], np.uint8)]
)
def test_token_ids_may_be_of_any_integer_type(client: DeltafrontClient, given: Any) -> None:
    text, *_ = collect(client.generate(given, max_tokens=4))
    assert text == expected(ids("ABC", bos=False), 4)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([65, "b", 67], r"prompt\.token_ids: 'str' object"),
        ([65, 66.0], r"prompt\.token_ids: 'float' object"),
        (["a", "b"], r"prompt\.token_ids: 'str' object"),
        ([USER, "b"], r"prompt\.messages: holds something else"),
        ([65, USER], r"prompt\.messages: holds something else"),
    ],
)
def test_nothing_is_left_out_of_a_prompt(client: DeltafrontClient, prompt: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        list(client.prefill(prompt))
    with pytest.raises(InvalidArgument, match=says.replace("prompt", "append", 1)):
        list(client.generate("a", append=prompt))


def test_a_stop_string_may_stand_alone(client: DeltafrontClient) -> None:
    answer = expected(ids("ABC"), 12)
    never = answer[5] + answer[4]  # both letters are answered, the string is not
    assert never not in answer
    for stop, reason in ((never, "length"), (answer[4:6], "stop_string")):
        text, _, finish, _ = collect(client.generate("ABC", max_tokens=12, stop=stop))
        assert (text, finish.reason) == (answer.partition(stop)[0], reason)


@pytest.mark.parametrize("address", ["localhost:nine", "[::1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    """Without a question to a name server: these fail before."""
    with DeltafrontClient(address, retry_s=0) as client:
        for call in (client.info, lambda: list(client.prefill("a"))):
            with pytest.raises(Unavailable, match="cannot be reached") as caught:
                call()
            assert type(caught.value) is Unavailable and address in str(caught.value)
