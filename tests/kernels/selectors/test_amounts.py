"""Amounts by layer and head reach the rule: the same masks as a rule with these amounts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltafront.kernels.build import Composition, build
from deltafront.kernels.interface import KernelInputError, no_phase
from deltafront.kernels.methods import PRESETS, method_spec
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.kernels.structured import structured_input
from deltafront.kernels.testing import spec_of, tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AMOUNTS = {3: (0.3, 0.6, 0.9), 7: (1.0, 0.5, 0.2)}
SCORED = ["block_pool", "delta_xattention", "dpxa", "naive", "xattention"]


def composition_of(name: str, amounts: dict[int, tuple[float, ...]] | None) -> Composition:
    method = build(method_spec(name, {"tau": 0.7, "window": 1, "min_tokens": 0}), amounts)
    assert isinstance(method, Composition)
    return method


@pytest.mark.parametrize("name", SCORED)
def test_each_layer_selects_by_its_own_amounts(name: str) -> None:
    x = structured_input(1100, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    selector = composition_of(name, AMOUNTS).selector
    assert isinstance(selector, ScoredSelector)
    masks = []
    for layer, amount in ((3, torch.tensor(AMOUNTS[3])), (7, torch.tensor(AMOUNTS[7])), (0, 0.7)):
        found = selector.select(x, selector.new_state(replace(spec_of(x), layer=layer)), no_phase)
        plain = composition_of(name, None).selector
        assert isinstance(plain, ScoredSelector)
        plain.rule = replace(plain.rule, amount=amount)
        assert tiles(found) == tiles(plain.select(x, plain.new_state(spec_of(x)), no_phase))
        masks.append(tiles(found))
    assert masks[0] != masks[1] != masks[2]


def test_amounts_go_through_the_correction_and_the_switch_for_short_prompts() -> None:
    x = structured_input(1100, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    densities = []
    for layer, amounts in ((3, {3: (1.0, 1.0, 1.0)}), (4, {3: (1.0, 1.0, 1.0)})):
        method = build(method_spec("block_pool+delta", {"tau": 0.3, "min_tokens": 1000}), amounts)
        _, coverage = method.attend(x, method.new_state(replace(spec_of(x), layer=layer)))
        densities.append(float(coverage.computed) / coverage.causal)
    assert densities[0] > 1.0 > densities[1]


@pytest.mark.parametrize("amounts", [(0.5, 0.5), (0.5,) * 4, (0.5, 0.5, 1.5), (0.5, 0.5, float("nan"))])
def test_amounts_that_do_not_fit_the_heads_are_refused(amounts: tuple[float, ...]) -> None:
    x = structured_input(300, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    method = composition_of("dpxa", {5: amounts})
    method.new_state(spec_of(x))
    with pytest.raises(KernelInputError, match=r"layer 5: .* 3 query heads"):
        method.new_state(replace(spec_of(x), layer=5))


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(SCORED)))
def test_methods_that_rank_nothing_take_no_amounts(name: str) -> None:
    with pytest.raises(KernelInputError, match=f"{name} ranks no tiles by a score"):
        build(method_spec(name), AMOUNTS)
