"""Service tiers that requests ask for, over HTTP and gRPC, and the best one that a token may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import InvalidArgument
from deltafront.workers.messages.service_tiers import ServiceTier

from ..inprocess import HANG_S, House
from .openai_calls import HI, MODEL, Open, chat, complete


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    (tmp_path / "tokens").write_text("alpha best=priority\nbeta\ngamma best=flex\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    house.decode.remembers = False
    return house


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        ({}, ServiceTier.DEFAULT),
        ({"service_tier": "auto"}, ServiceTier.DEFAULT),
        ({"service_tier": "flex"}, ServiceTier.FLEX),
        ({"service_tier": "priority", "priority": -1}, ServiceTier.PRIORITY),
        ({"priority": 7}, ServiceTier.FLEX),
    ],
)
def test_openai_fields_choose_the_tier(
    house: House, address: str, connect: Open, ask: Any, fields: dict[str, Any], tier: ServiceTier
) -> None:
    ask(connect(address, "alpha"), extra_body=fields)
    assert house.group.jobs[-1].service_tier is tier


def test_request_for_a_tier_above_its_tokens_best_is_refused(
    house: House, address: str, connect: Open
) -> None:
    with pytest.raises(openai.BadRequestError, match="service_tier: priority is better than this token may"):
        chat(connect(address, "beta"), service_tier="priority")
    with pytest.raises(openai.BadRequestError, match="default is better than this token may ask for"):
        chat(connect(address, "gamma"), service_tier="default")
    with pytest.raises(openai.BadRequestError, match="contradicts service_tier"):
        chat(connect(address, "alpha"), service_tier="default", extra_body={"priority": 1})
    with pytest.raises(openai.BadRequestError, match="service_tier"):
        chat(connect(address, "alpha"), extra_body={"service_tier": "scale"})
    assert not house.group.jobs
    chat(connect(address, "gamma"))
    assert house.group.jobs[-1].service_tier is ServiceTier.FLEX, "its best"


def test_responses_messages_and_grpc_requests_choose_the_tier(
    house: House, address: str, connect: Open
) -> None:
    connect(address, "alpha").responses.create(model=MODEL, input="hi", service_tier="flex")
    assert house.group.jobs[-1].service_tier is ServiceTier.FLEX
    body = {"model": MODEL, "max_tokens": 2, "messages": HI, "service_tier": "standard_only"}
    message = httpx.post(f"{address}/v1/messages", json=body, headers={"x-api-key": "beta"}, timeout=HANG_S)
    assert message.status_code == 200
    assert house.group.jobs[-1].service_tier is ServiceTier.DEFAULT
    with DeltafrontClient(house.address, "alpha") as client:
        list(client.generate("hi", max_tokens=1, service_tier="priority"))
        assert house.group.jobs[-1].service_tier is ServiceTier.PRIORITY
        list(client.prefill("hi", service_tier="flex"))
        assert house.group.jobs[-1].service_tier is ServiceTier.FLEX
        with pytest.raises(InvalidArgument, match="is not one of priority, default, flex"):
            list(client.generate("hi", service_tier="best"))
