"""Limits a minute and usage by caller, over HTTP and gRPC, on a clock that the tests set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import Overloaded
from deltafront.service.request.rates import RateLimits

from ..inprocess import HANG_S, House, wait_until
from ..test_metrics import value
from .openai_calls import HI, MODEL, Open, chat, complete

TOKENS = "alpha name=ann requests_per_minute=3\nbeta name=bob tokens_per_minute=100\ngamma\n"


@pytest.fixture
def now() -> list[float]:
    """The time of the door's limits, in seconds."""
    return [0.0]


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path, now: list[float]) -> House:
    (tmp_path / "tokens").write_text(TOKENS)
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    house.door._requests._resources.callers.rates = RateLimits(1, lambda: now[0])
    return house


def limits(response: Any) -> dict[str, str]:
    return {name: text for name, text in response.headers.items() if name.startswith("x-ratelimit")}


def test_request_over_the_limit_gets_429_and_when_to_retry(
    address: str, connect: Open, now: list[float]
) -> None:
    api = connect(address, "alpha")
    answer = api.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=2)
    assert limits(answer) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "20s",
    }
    stream = api.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, max_tokens=2, stream=True
    )
    assert limits(stream)["x-ratelimit-remaining-requests"] == "1"
    assert list(stream.parse())
    chat(api)
    with pytest.raises(openai.RateLimitError) as caught:
        chat(api)
    assert caught.value.response.headers["retry-after"] == "20"
    assert limits(caught.value.response)["x-ratelimit-remaining-requests"] == "0"
    assert caught.value.body == {
        "message": "3 requests a minute for this caller: try again in 20 s",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    body = {"model": MODEL, "max_tokens": 2, "messages": HI}
    message = httpx.post(f"{address}/v1/messages", json=body, headers={"x-api-key": "alpha"}, timeout=HANG_S)
    assert message.status_code == 429 and message.headers["retry-after"] == "20"
    assert message.json()["error"]["type"] == "rate_limit_error"
    now[0] = 20.0
    chat(api)


def test_tokens_that_are_not_cached_count_against_the_limit(
    house: House, address: str, connect: Open, now: list[float]
) -> None:
    api = connect(address, "beta")
    complete(api, "x" * 79, max_tokens=20)  # with BOS and the answer 100 tokens
    with pytest.raises(openai.RateLimitError, match="100 tokens a minute for this caller: try again in 1 s"):
        complete(api)
    with (
        DeltafrontClient(house.address, "beta") as client,
        pytest.raises(Overloaded, match="100 tokens a minute") as caught,
    ):
        list(client.generate("x", max_tokens=1))
    assert caught.value.retry_after_s == 1.0
    now[0] = 60.0
    with DeltafrontClient(house.address, "beta") as client:
        *_, kept = client.prefill("y" * 49)
        session = kept.session.session_id  # type: ignore[union-attr]
        list(client.generate(session_id=session, append="z" * 9, max_tokens=10))
    uses = house.door._requests._resources.callers.rates
    (used,) = [use.units for (_owner, unit), use in uses._uses.items() if unit == "tokens"]
    assert used == 50 + 9 + 10


def test_usage_is_counted_by_named_callers(house: House, address: str, connect: Open) -> None:
    chat(connect(address, "alpha"), max_tokens=3)
    for _ in range(2):
        complete(connect(address, "gamma"), "x" * 40, max_tokens=5)
    with pytest.raises(openai.BadRequestError):
        complete(connect(address, "gamma"), "x", max_tokens=-1)
    with pytest.raises(openai.AuthenticationError):
        complete(connect(address, "unknown"))
    wait_until(
        lambda: value(house, "requests_total", method_rpc="Generate") == 5, "a request was not counted"
    )
    assert value(house, "caller_tokens_total", caller="ann", kind="completion") == 3
    assert value(house, "caller_tokens_total", caller="others", kind="completion") == 10
    assert value(house, "caller_tokens_total", caller="others", kind="prompt") == 2 * 41
    assert value(house, "caller_tokens_total", caller="others", kind="cached") == value(
        house, "cached_tokens_total"
    )
    assert value(house, "caller_requests_total", caller="others", outcome="finished") == 2
    assert value(house, "caller_requests_total", caller="others", outcome="invalid_argument") == 1
    assert value(house, "caller_requests_total") == 4
