"""A decode worker of several ranks chooses what one rank chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.ranks import InOrder, LeadRunner, runner_sizes
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, warm_up
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.model.directory.model_config import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec
from deltafront.workers.settings import DecodeConfig

from ..tiny_model import make_tiny_model
from .in_ranks import followers, part, parts, unused
from .test_decode_runner import MAX_BATCH, PAGES, churn

CONFIG = DecodeConfig(
    full_layers=(0,),
    delta_layers=(2,),
    page_budget=3,
    recency=1,
    cache_tokens=16 * PAGES,
    max_batch=MAX_BATCH,
)


def whole_runner(directory: Path) -> DecodeRunner:
    config = read_config(directory)
    spec = StackSpec(
        config=config,
        layers=range(config.layers),
        embedding=True,
        head=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    stack = load_stack(directory, spec)
    return DecodeRunner(stack, plan_layers(CONFIG, config.layers), **runner_sizes(CONFIG, stack.config))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(2, 4, 2), (2, 4, 4), (4, 8, 4), (2, 12, 4), (3, 6, 3)]
)
def test_ranks_choose_what_one_rank_chooses(tmp_path: Path, ranks: int, heads: int, kv_heads: int) -> None:
    """Requests that come and go at random, with and without selected pages; a vocabulary that the ranks
    cannot share equally; K/V by heads."""
    directory = make_tiny_model(tmp_path, heads=heads, kv_heads=kv_heads)
    alone = whole_runner(directory)
    stacks = parts(directory, ranks)
    with followers(stacks, CONFIG, unused) as others:
        lead = LeadRunner(stacks[0], plan_layers(CONFIG, 5), others, **runner_sizes(CONFIG, stacks[0].config))
        theirs, ours = churn(alone, 3, 80, lambda free: None), churn(lead, 3, 80, lambda free: None)
    assert [request.answer for request in ours] == [request.answer for request in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
    caches = [lead.cache, *(other._runner.cache for other in others)]
    assert [cache.heads for cache in caches] == [
        slice(n * kv_heads // ranks, (n + 1) * kv_heads // ranks) for n in range(ranks)
    ]
    for side in ("k_LPSGD", "v_LPSGD"):
        # Pages of live requests alone: `churn` poisons the lead's others.
        kept = sorted({page for request in ours if request.left for page in request.pages[:-2]})
        joined = torch.cat([getattr(cache, side)[:, kept] for cache in caches], dim=3)
        expected = getattr(alone.cache, side)[:, kept]
        written = ~expected.isnan() & ~joined.isnan()
        assert torch.allclose(joined[written], expected[written], atol=2e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_and_recompute_as_one_rank_does(tmp_path: Path, ranks: int) -> None:
    """The blocks that a question attends to most are the same, by the heads of all ranks."""
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
            look = Read(700, ids[700:], select_blocks=2, select_among=700)
            blocks = runner.append(pages, look, last=False).blocks
            runner.recompute(pages, blocks, [token for b in blocks for token in ids[b * 128 : (b + 1) * 128]])
            results.append((blocks, runner.append(pages, Read(700, ids[700:]), last=True).logits_V))
    (blocks, logits_V), (our_blocks, our_logits_V) = results
    assert our_blocks == blocks and len(blocks) == 2
    assert logits_V is not None and our_logits_V is not None and logits_V.shape == (199,)
    assert torch.allclose(our_logits_V, logits_V, atol=2e-4)


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
def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path, ranks: int, message: str) -> None:
    with pytest.raises(ModelError, match=f"decode.tensor_parallel: {ranks} ranks.*{message}"):
        part(make_tiny_model(tmp_path), 0, ranks)


def test_calls_that_overtake_each_other_are_made_in_order() -> None:
    made: list[str] = []
    calls = InOrder(made.append)
    for number, word in ((2, "c"), (0, "a"), (1, "b"), (4, "e"), (3, "d")):
        calls(number, word)
    assert made == ["a", "b", "c", "d", "e"]
