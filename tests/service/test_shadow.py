"""`door.shadow`: answers that are compared with dense attention while workers are idle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import WorkerFailed
from deltafront.service.fleet.fleet_view import FleetView
from deltafront.service.metrics import ShadowOutcome
from deltafront.service.request import shadow
from deltafront.service.request.calls import Call
from deltafront.service.request.shadow import compared, idle_worker, is_comparable
from deltafront.workers.messages.events import (
    DecodeReport,
    FinishEvent,
    FinishReason,
    PromptLogprobs,
    Token,
    TokenLogprob,
)
from deltafront.workers.messages.requests import RequestOptions, Sampling
from deltafront.workers.messages.states import DecodeStats, GroupStats
from deltafront.workers.settings import PrefillConfig

from .inprocess import House, wait_until
from .test_metrics import value
from .test_requests import collect, ids, nothing_left

PROMPT = "p" * 700
SPARSE: dict[str, Any] = {"method": "streaming", "options": {"min_tokens": 0}}


def reads(house: House, outcome: ShadowOutcome) -> float:
    return value(house, "shadow_reads_total", outcome=outcome)


@pytest.fixture
def sampling(make_house: Callable[..., House]) -> House:
    return make_house(shadow=1.0)


@pytest.fixture
def asking(sampling: House) -> Iterator[DeltafrontClient]:
    with DeltafrontClient(sampling.address) as client:
        yield client


def test_sparse_answer_is_compared_with_dense_attention(sampling: House, asking: DeltafrontClient) -> None:
    """The fake worker gives each token of an answer -0.5 nats, and of a prompt -id/100."""
    _, tokens, _, _ = collect(asking.generate(PROMPT, max_tokens=8, **SPARSE))
    wait_until(lambda: reads(sampling, ShadowOutcome.COMPARED) == 1, "it was not compared")
    caller, again = sampling.decode.reservations
    assert (again.owner, again.key, again.wait, again.reads_rest) == ("", None, False, True)
    assert again.options.shadow and not caller.options.shadow
    assert again.options.logprobs_from == 701
    answer = b"".join(token.token_id.to_bytes(4, "little") for token in tokens)
    assert sampling.decode.jobs[-1].extend_ids == ids(PROMPT) + answer
    assert value(sampling, "shadow_tokens_total", method="streaming") == 8
    assert value(sampling, "shadow_nats_total", reading="given") == 4.0
    dense = sum(token.token_id for token in tokens) / 100
    assert value(sampling, "shadow_nats_total", reading="dense") == pytest.approx(dense)
    assert value(sampling, "shadow_agreement_ratio_sum", method="streaming") == 1.0
    nothing_left(sampling)
    assert value(sampling, "requests_total") == 1, "it is no caller's request"


def test_no_answer_is_compared_with_dense_attention_by_default(
    house: House, client: DeltafrontClient
) -> None:
    collect(client.generate(PROMPT, max_tokens=8, **SPARSE))
    nothing_left(house)
    assert len(house.decode.reservations) == 1


CALL = Call(
    request_id="a",
    owner="",
    method=PrefillConfig().method("streaming", {"min_tokens": 0}),
    sampling=Sampling(temperature=0.7),
    options=RequestOptions(),
)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": PrefillConfig().method("dense")},
        {"method": PrefillConfig().method("streaming")},
        {"sampling": Sampling(frequency_penalty=0.5)},
        {"options": RequestOptions(constraint="start: /a/")},
        {"options": RequestOptions(prompt_logprobs=0)},
        {"session_id": "x.s1"},
        {"answered": (97,)},
    ],
    ids=["dense", "short", "penalised", "constrained", "echo", "session", "resumed"],
)
def test_answer_that_cannot_be_compared_is_left_out(changed: dict[str, Any]) -> None:
    assert is_comparable(CALL, 700)
    assert not is_comparable(replace(CALL, **changed), 700)


def test_second_answer_is_skipped_while_one_waits(make_house: Callable[..., House]) -> None:
    """Nothing looks for an idle worker within the hour."""
    house = make_house(shadow=1.0, refresh_s=3600)
    house.loop.run(house.fleet.refresh())
    with DeltafrontClient(house.address) as client:
        for _ in range(2):
            collect(client.generate(PROMPT, max_tokens=3, skip_cache=True, **SPARSE))
    wait_until(lambda: reads(house, ShadowOutcome.SKIPPED) == 1, "the second was not skipped")
    assert not any(told.options.shadow for told in house.decode.reservations)


def test_answer_expires_if_workers_are_never_idle(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(shadow, "idle_worker", lambda view, tokens: None)
    house = make_house(shadow=1.0)
    with DeltafrontClient(house.address) as client:
        collect(client.generate(PROMPT, max_tokens=3, **SPARSE))
    wait_until(lambda: reads(house, ShadowOutcome.EXPIRED) == 1, "it did not expire")


def decode(name: str, **more: Any) -> DecodeStats:
    given = {"pages_total": 100, "pages_free": 100, "running": 0, "waiting": 0, "sessions": 0}
    return DecodeStats(name=name, **(given | more))


def group(**more: Any) -> GroupStats:
    given = {"pages_total": 100, "pages_free": 100, "running": 0, "waiting": 0, "waiting_tokens": 0}
    return GroupStats(name="g", tokens_per_second=0.0, **(given | more))


@pytest.mark.parametrize(
    ("workers", "groups", "chosen"),
    [
        ([decode("a")], [group()], "a"),
        ([decode("a")], [group(waiting=1)], None),
        ([decode("a")], [group(running=1)], None),
        ([decode("a", running=1), decode("b", waiting=1)], [group()], None),
        ([decode("a", draining=True), decode("b", pages_free=62)], [group()], None),
        ([decode("a", pages_remembered=90), decode("b", pages_free=70)], [group()], "b"),
    ],
)
def test_only_an_idle_worker_with_free_pages_is_chosen(
    workers: list[DecodeStats], groups: list[GroupStats], chosen: str | None
) -> None:
    view = FleetView({one.name: one for one in groups}, {one.name: one for one in workers})
    assert idle_worker(view, 1000) == chosen


def token(index: int, token_id: int, logprob: float, likeliest: int | None = None) -> Token:
    top = () if likeliest is None else (TokenLogprob(token_id=likeliest, logprob=logprob),)
    return Token(index=index, token_id=token_id, logprob=logprob, top=top)


DENSE = [token(9, 5, -1.0, 5), token(10, 6, -2.0, 7), token(11, 8, -0.5, 8), token(12, 9, -0.5, 9)]


@pytest.mark.parametrize(
    ("greedy", "tops", "agreement"),
    [
        (True, (None, None, None, None), 0.75),
        (False, (None, None, None, None), None),
        (False, (5, 7, 1, 1), 0.5),
    ],
    ids=["greedy", "sampled", "sampled with top"],
)
def test_agreement_needs_the_likeliest_token_of_sparse_and_dense(
    greedy: bool, tops: tuple[int | None, ...], agreement: float | None
) -> None:
    given = [token(n, one.token_id, -0.25, tops[n]) for n, one in enumerate(DENSE)]
    found = compared(given, DENSE, greedy=greedy)
    assert (found.tokens, found.given_nats, found.dense_nats) == (4, 1.0, 4.0)
    assert found.agreement == agreement


class Worker:
    """A worker whose dense reading ends in this way."""

    name = "decode:x"

    def __init__(self, logprobs: list[float], reason: FinishReason) -> None:
        self.logprobs, self.reason = logprobs, reason

    async def generate(self, job: Any) -> AsyncIterator[PromptLogprobs | FinishEvent]:
        yield PromptLogprobs(tokens=tuple(token(1 + n, 5, p, 5) for n, p in enumerate(self.logprobs)))
        yield FinishEvent(
            request_id=job.request_id, reason=self.reason, completion_tokens=0, report=DecodeReport()
        )


async def test_comparison_ended_by_another_request_is_dropped() -> None:
    worker: Any = Worker([], FinishReason.CANCELLED)
    assert await shadow._dense_tokens(worker, "a", bytes(12), 1) is None


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, float("nan")]], ids=["missing", "not finite"])
async def test_comparison_with_missing_or_nan_log_probabilities_fails(logprobs: list[float]) -> None:
    worker: Any = Worker(logprobs, FinishReason.LENGTH)
    with pytest.raises(WorkerFailed, match="missing or not finite"):
        await shadow._dense_tokens(worker, "a", bytes(12), 1)
