"""Tests the division of layers among stages against brute force.

A0 M0 A1 M1 … are the attention and MLP halves of layers 0, 1, ….
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from deltafront.service.cli.size import SHAPES
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.layer_config import MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig
from deltafront.workers.model.layer_shares import LayerShare, balanced
from deltafront.workers.model.weights.stack_weights import StackSpec


def shape(layers: int, hidden: int, intermediate: int, vocab: int) -> ModelConfig:
    rope = RopeConfig(1e4)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=vocab,
        positions=512,
        rms_eps=1e-5,
        rope=rope,
    )


def costs_of(config: ModelConfig) -> list[int]:
    """Count the multiplications per token of A0, M0, A1, M1, …. Attention has q, k, v, output, and for each
    of 5,700 keys a score and a value; an MLP has gate, up and down. The last layer has only q, k, v and the
    head."""
    qkv = config.hidden * config.head_dim * (config.q_heads + 2 * config.kv_heads)
    attention = qkv + config.hidden * config.q_heads * config.head_dim
    attention += 5_700 * 2 * config.q_heads * config.head_dim
    mlp = 3 * config.hidden * config.intermediate
    head = config.vocab * config.hidden // 512
    return [attention, mlp] * (config.layers - 1) + [qkv + head, 0]


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the bounds of all cuts of A0 M0 A1 M1 … in which each part has an A (an even index)."""
    for cuts in itertools.combinations(range(1, 2 * layers), stages - 1):
        bounds = [0, *cuts, 2 * layers]
        if all(any(half % 2 == 0 for half in range(*pair)) for pair in itertools.pairwise(bounds)):
            yield tuple(bounds)


def cuts_of(parts: tuple[LayerShare, ...]) -> tuple[int, ...]:
    """Return the bounds of parts. Assert that the parts follow one another without gaps."""
    bounds = [0]
    for part in parts:
        halves = sorted([2 * layer for layer in part.layers] + [2 * layer + 1 for layer in part.mlps])
        assert len(part.layers) > 0 and halves == list(range(bounds[-1], halves[-1] + 1))
        assert part.layers.start - part.mlps.start in (0, 1) and part.layers.stop - part.mlps.stop in (0, 1)
        bounds.append(halves[-1] + 1)
    return tuple(bounds)


def shares_of(costs: Sequence[int], bounds: tuple[int, ...]) -> list[int]:
    return [sum(costs[start:end]) for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
@pytest.mark.parametrize("vocab", [100, 4_000_000, 400_000_000])
@pytest.mark.parametrize("intermediate", [128, 4096, 40_000])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layer_split_over_stages_equals_brute_force(
    layers: int, vocab: int, intermediate: int, stages: int
) -> None:
    config = shape(layers, 64, intermediate, vocab)
    if stages > layers:
        with pytest.raises(ModelError, match="stages"):
            config.split(stages)
        return
    costs, found = costs_of(config), cuts_of(config.split(stages))
    every = list(every_cut(layers, stages))
    assert found in every
    least = min(max(shares_of(costs, bounds)) for bounds in every)
    assert max(shares_of(costs, found)) == least
    best = [bounds for bounds in every if max(shares_of(costs, bounds)) == least]
    inside = min(sum(bound % 2 for bound in bounds) for bounds in best)
    assert sum(bound % 2 for bound in found) == inside, "layers are cut in two only where that gains"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_layer_split_counts_the_cost_of_windows_and_dense_mlps(first: int, stages: int) -> None:
    """The first layers have dense MLPs, later ones experts, and two of three layers have windows."""
    layers, hidden, width, dense, window = 6, 64, 48, 4096, 100
    mixture = MixtureConfig(
        experts=32,
        per_token=4,
        normed=True,
        shared_width=80,
        dense_layers=tuple(range(first)),
        dense_width=dense,
    )
    windows = {"sliding_window": window, "window_layers": tuple(n for n in range(layers) if n % 3)}
    config = replace(shape(layers, hidden, width, 100), mixture=mixture, **windows)
    costs = []
    for layer in range(layers):
        keys = window if layer % 3 else 5_700
        costs += [hidden * 16 * (4 + 2 * 2) + hidden * 16 * 4 + keys * 2 * 4 * 16]
        costs += [3 * hidden * (dense if layer < first else 4 * width + 80) + 32 * hidden * (layer >= first)]
    costs[-2:] = hidden * 16 * 8 + 100 * hidden // 512, 0
    least = min(max(shares_of(costs, bounds)) for bounds in every_cut(layers, stages))
    assert max(shares_of(costs, cuts_of(config.split(stages)))) == least


@pytest.mark.parametrize("seed", range(60))
def test_splits_any_layer_costs_optimally(seed: int) -> None:
    """Costs are random: of attention, of MLPs and of the last layer."""
    rng = random.Random(seed)
    layers = rng.randint(1, 7)
    costs = [rng.randint(1, 9), rng.randint(0, 9)] * layers
    costs[-2:] = rng.randint(1, 20), 0
    for stages in range(1, layers + 1):
        found = cuts_of(balanced(tuple(costs), stages))

        def worth(bounds: tuple[int, ...]) -> tuple[int, int, int]:
            shares = shares_of(costs, bounds)
            return max(shares), sum(bound % 2 for bound in bounds), sum(share**2 for share in shares)

        assert worth(found) == min(worth(bounds) for bounds in every_cut(layers, stages))


def test_two_stages_of_llama_8b_share_a_layer() -> None:
    """With whole layers, the first stage would have 16 full layers, the second 15 and a short last one."""
    config = SHAPES["8b"]
    assert config.split(2) == (LayerShare(range(16), range(15)), LayerShare(range(16, 32), range(15, 32)))
    first, last = shares_of(costs_of(config), cuts_of(config.split(2)))
    layer = sum(costs_of(config)[:2])
    assert max(first, last) < 15.8 * layer


def test_does_not_cut_a_layer_if_a_cut_does_not_help() -> None:
    """With four stages of Llama 8B, one stage has the cost of eight layers in any division."""
    for name, stages in (("8b", 4), ("8b", 8), ("70b", 4), ("70b", 8)):
        parts = SHAPES[name].split(stages)
        each = SHAPES[name].layers // stages
        assert [len(part.layers) for part in parts] == [each] * stages
        assert all(part.layers == part.mlps for part in parts)


def test_gives_the_last_stage_fewer_layers_for_a_large_output_head() -> None:
    light, heavy = shape(12, 64, 128, 1000).split(3), shape(12, 64, 128, 40_000_000).split(3)
    assert [len(part.layers) for part in light] == [4, 4, 4]
    assert len(heavy[-1].layers) < len(heavy[0].layers)


def test_layers_with_parallel_attention_and_mlp_are_not_cut() -> None:
    parallel, weights = replace(shape(8, 64, 96, 211), parallel=True), cast(Any, None)
    assert all(share.layers == share.mlps for share in parallel.split(3))
    spec = StackSpec(
        config=parallel,
        layers=range(2, 4),
        mlps=range(1, 4),
        embedding=False,
        head=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with pytest.raises(ModelError, match="cannot be cut within"):
        LayerStack(spec, weights)
