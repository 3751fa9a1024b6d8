"""Tests that a decode worker with several tensor-parallel ranks samples the same tokens as one rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.tests.workers.in_ranks import followers, part, parts, unused
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.decode.ranks import InOrder, LeadRunner, runner_sizes
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, warm_up
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.kv.handoff.object_store import ObjectStoreReader
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.messages.requests import DecodeFailed, Reservation, Sampling
from deltafront.workers.messages.stages import KVAnnouncement, KVRange
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.settings import DecodeConfig

from ..tiny_model import make_tiny_model
from .test_decode_runner import MAX_BATCH, PAGES, churn

CONFIG = DecodeConfig(
    full_layers=(0,),
    delta_layers=(2,),
    page_budget=3,
    recency=1,
    cache_tokens=16 * PAGES,
    max_batch=MAX_BATCH,
)


def whole_runner(directory: Path, config: DecodeConfig = CONFIG) -> DecodeRunner:
    stack = part(directory, 0, 1)
    return DecodeRunner(stack, plan_layers(config, stack.config.layers), **runner_sizes(config, stack.config))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(2, 4, 2), (2, 4, 4), (4, 8, 4), (2, 12, 4), (3, 6, 3)]
)
def test_ranks_sample_the_same_tokens_as_one_rank(
    tmp_path: Path, ranks: int, heads: int, kv_heads: int
) -> None:
    """Requests join and leave at random, with and without page selection. The vocabulary does not divide
    evenly over the ranks."""
    directory = make_tiny_model(tmp_path, heads=heads, kv_heads=kv_heads)
    alone = whole_runner(directory)
    stacks = parts(directory, ranks)
    with followers(stacks, CONFIG, unused) as others:
        lead = LeadRunner(stacks[0], plan_layers(CONFIG, 5), others, **runner_sizes(CONFIG, stacks[0].config))
        theirs, ours = (churn(runner, 3, 40, lambda free: None) for runner in (alone, lead))
    assert [request.answer for request in ours] == [request.answer for request in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
    caches = [lead.cache, *(other._runner.cache for other in others)]
    assert [cache.heads for cache in caches] == [
        slice(n * kv_heads // ranks, (n + 1) * kv_heads // ranks) for n in range(ranks)
    ]
    for side in ("k_LPSGD", "v_LPSGD"):
        # Only pages of live requests: `churn` fills rank 0's other pages with NaN.
        kept = sorted({page for request in ours if request.left for page in request.pages[:-2]})
        joined = torch.cat([getattr(cache, side)[:, kept] for cache in caches], dim=3)
        expected = getattr(alone.cache, side)[:, kept]
        written = ~expected.isnan() & ~joined.isnan()
        assert torch.allclose(joined[written], expected[written], atol=2e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_prefill_and_recompute_as_one_rank(tmp_path: Path, ranks: int) -> None:
    """The ranks also select the same blocks to recompute, although each sees only its own heads."""
    directory = make_tiny_model(tmp_path, heads=8, kv_heads=4)
    alone = whole_runner(directory)
    ids = [n * 7 % 198 for n in range(900)]
    pages = tuple(range(60))
    stacks = parts(directory, ranks)
    results = []
    with followers(stacks, CONFIG, unused) as others:
        lead = LeadRunner(stacks[0], plan_layers(CONFIG, 5), others, **runner_sizes(CONFIG, stacks[0].config))
        for runner in (alone, lead):
            runner.append(pages, Read(0, ids[:700]), last=False)
            question = Read(700, ids[700:])
            look = replace(question, select_blocks=2, select_among=700)
            blocks = runner.append(pages, look, last=False).blocks
            again = [token for b in blocks for token in ids[b * 128 : (b + 1) * 128]]
            results.append((blocks, runner.recompute(pages, blocks, again, question, last=True).logits_V))
    (blocks, logits_V), (our_blocks, our_logits_V) = results
    assert our_blocks == blocks and len(blocks) == 2
    assert logits_V is not None and our_logits_V is not None and logits_V.shape == (199,)
    assert torch.allclose(our_logits_V, logits_V, atol=2e-4)


class Recorder:
    """A rank that only records the calls it gets. `reading` replaces its transfer of KV."""

    def __init__(self, reading: Callable[[], Awaitable[int]] | None = None) -> None:
        self.sent: list[str] = []
        self._reading = reading

    def compute(self, work: str, *_arguments: Any) -> None:
        self.sent.append(work)

    async def read(self, *_arguments: Any) -> int:
        assert self._reading is not None
        return await self._reading()

    async def kv(self, *_arguments: Any) -> Any:
        raise DecodeFailed("rank 1 died")


@pytest.mark.parametrize("failing", range(4))
def test_no_call_is_made_after_a_failure_on_rank_0(tmp_path: Path, failing: int) -> None:
    """Otherwise the other ranks' all-reduce would meet that of rank 0's next call."""
    stack, other = part(make_tiny_model(tmp_path), 0, 2), Recorder()
    lead = LeadRunner(stack, plan_layers(CONFIG, 5), [other], **runner_sizes(CONFIG, stack.config))
    row = Row(1, (0, 1), 3, 5, Sampling(), False)
    calls: list[Callable[[], Any]] = [
        lambda: lead.launch([row]),
        lambda: lead.append((0, 1), Read(0, [1, 2, 3]), last=True),
        lambda: lead.recompute(tuple(range(16)), (0,), [1] * 128, Read(128, [1]), last=True),
        lambda: lead.first_tokens([torch.zeros(199)], [row], [(0, 1)]),
    ]
    with pytest.raises(RuntimeError, match=r"^rank 0 has not joined"):
        calls[failing]()
    assert lead.fault.startswith("its ranks are out of step: RuntimeError: rank 0 has not joined")
    assert len(other.sent) == 1
    for call in calls:
        with pytest.raises(RuntimeError, match="out of step"):
            call()
    assert len(other.sent) == 1


async def engine_beside(directory: Path, other: Recorder) -> DecodeEngine:
    """Start rank 0's engine with another rank. A prompt of 32 tokens is reserved as `a`."""
    stack = part(directory, 0, 2)
    engine = DecodeEngine("decode:test", stack, CONFIG, reader=ObjectStoreReader, ranks=[other])
    await engine.start()
    await engine.reserve(Reservation(request_id="a", owner="me", new_tokens=32, max_tokens=4))
    return engine


PIECE = KVAnnouncement(
    request_id="a", layer=0, start=0, tokens=32, payload=(np.zeros((32, 2, 64), np.float32),) * 2
)


@pytest.mark.parametrize("giving", [False, True])
async def test_rank_that_dies_during_a_kv_transfer_fails_the_worker(tmp_path: Path, giving: bool) -> None:
    """Covers receiving KV and sending it back. API servers get the error at once, and no prefill group is
    blamed."""

    async def dies() -> int:
        raise DecodeFailed("rank 1 died")

    engine = await engine_beside(make_tiny_model(tmp_path), Recorder(dies))
    back = KVRange(request_id="a", layer=0, start=0, tokens=1)
    with pytest.raises(DecodeFailed, match=r"^rank 1 died"):
        await (engine.kv(back) if giving else engine.announce(PIECE))
    other = Reservation(request_id="b", owner="me", new_tokens=32, max_tokens=4)
    for call in (engine.stats(), engine.reserve(other), engine.resume("a", [16], 1)):
        with pytest.raises(DecodeFailed, match="rank 1 died"):
            await call
    assert "rank 1 died" in engine.fault
    await engine.cancel("a")
    assert engine._manager.pool.used == 0
    await engine.close()


async def test_pages_stay_in_use_until_the_last_rank_has_copied_kv(tmp_path: Path) -> None:
    """One rank's transfer fails, which fails only this request. The request is cancelled meanwhile."""
    began, release = asyncio.Event(), asyncio.Event()

    async def reads_long() -> int:
        began.set()
        await release.wait()
        return 1

    engine = await engine_beside(make_tiny_model(tmp_path), Recorder(reads_long))
    announcing = asyncio.create_task(engine.announce(replace(PIECE, payload=None)))
    await began.wait()
    cancelling = asyncio.create_task(engine.cancel("a"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert engine._manager.pool.used == 3 and not cancelling.done() and not announcing.done()
    release.set()
    with pytest.raises(HandoffError):
        await announcing
    await cancelling
    assert engine._manager.pool.used == 0 and not engine.fault
    await engine.close()


def test_rank_0_waits_until_every_rank_has_copied_its_pages(tmp_path: Path) -> None:
    """A copy has no all-reduce of a layer. Without waiting, KV of the next request could overwrite the source
    first."""
    stacks = parts(make_tiny_model(tmp_path), 2)
    gate = threading.Event()
    with followers(stacks, CONFIG, unused) as others, ThreadPoolExecutor(1) as thread:
        lead = LeadRunner(stacks[0], plan_layers(CONFIG, 5), others, **runner_sizes(CONFIG, stacks[0].config))
        late = others[0]._compute.submit(gate.wait)
        others[0]._runner.cache.k_LPSGD[:, 3] = 7.0
        row = Row(1, (3, 4), 3, 5, Sampling(), False)
        copied = thread.submit(lead.first_tokens, [torch.zeros(199)], [row], [(3, 4)])
        assert not wait([copied, late], timeout=0.2).done
        gate.set()
        copied.result()
        assert (others[0]._runner.cache.k_LPSGD[:, 4] == 7.0).all()


def test_warm_up_runs_on_every_rank(tmp_path: Path) -> None:
    stacks = parts(make_tiny_model(tmp_path), 2)
    with followers(stacks, CONFIG, unused) as others:
        lead = LeadRunner(stacks[0], plan_layers(CONFIG, 5), others, **runner_sizes(CONFIG, stacks[0].config))
        warm_up(lead, 16 * PAGES, True)
    assert others[0]._runner.cache.k_LPSGD[:, PAGES].any(), "the scratch page"
    assert not others[0]._runner.cache.k_LPSGD[:, :PAGES].any()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(4, "share the model's 2 key/value heads"), (64, "key/value heads"), (3, "key/value heads")],
)
def test_refuses_heads_that_do_not_divide_over_the_ranks(tmp_path: Path, ranks: int, message: str) -> None:
    with pytest.raises(ModelError, match=f"decode.tensor_parallel: {ranks} ranks.*{message}"):
        part(make_tiny_model(tmp_path), 0, ranks)


def test_ranks_run_reordered_calls_in_their_order() -> None:
    made: list[str] = []
    calls = InOrder()
    for number, word in ((2, "c"), (0, "a"), (1, "b"), (4, "e"), (3, "d")):
        calls(number, partial(made.append, word))
    assert made == ["a", "b", "c", "d", "e"]
