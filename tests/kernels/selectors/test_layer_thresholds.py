"""Tests that selectors use thresholds by layer, head and prompt length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltafront.kernels import options
from deltafront.kernels.build import Composition, build
from deltafront.kernels.interface import KernelInputError, Thresholds, no_phase
from deltafront.kernels.methods import PRESETS, method_spec
from deltafront.kernels.options import Value
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.tests.numerics import spec_of, tiles
from deltafront.tests.reference.structured import structured_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THRESHOLDS = {0: (0.7, 0.7, 0.7), 3: (0.3, 0.6, 0.9), 7: (1.0, 0.5, 0.2)}
OWN = [name for name, preset in PRESETS.items() if preset.module == options.__name__]
"""The package's methods, without those that other tests register."""
SCORED = ["delta_xattention", "dpxa", "xattention"]


def thresholds_of(layer: int, _tokens: int) -> tuple[float, ...]:
    return THRESHOLDS[layer]


def selector_of(name: str, thresholds: Thresholds | None, **options: Value) -> ScoredSelector:
    method = build(method_spec(name, {"tau": 0.7, "window": 1, "min_tokens": 0, **options}), thresholds)
    assert isinstance(method, Composition) and isinstance(method.selector, ScoredSelector)
    return method.selector


@pytest.mark.parametrize("name", SCORED)
def test_each_layer_selects_by_its_own_thresholds(name: str) -> None:
    drawn = structured_input(
        1100, q_heads=3, kv_heads=1, head_dim=16
    )  # on the CPU: a GPU draws other numbers
    rows = {side: getattr(drawn, side).to(DEVICE) for side in ("q_BHTD", "k_BGSD", "v_BGSD")}
    x = replace(drawn, **rows)
    selector = selector_of(name, thresholds_of)
    masks = []
    for layer, thresholds in THRESHOLDS.items():
        found = selector.select(x, selector.new_state(replace(spec_of(x), layer=layer)), no_phase)
        plain = selector_of(name, None)
        plain.rule = replace(plain.rule, threshold=torch.tensor(thresholds))
        assert tiles(found) == tiles(plain.select(x, plain.new_state(spec_of(x)), no_phase))
        masks.append(tiles(found))
    assert masks[0] != masks[1] != masks[2] != masks[0]


def test_thresholds_depend_on_layer_and_prompt_length() -> None:
    asked = []

    def thresholds(layer: int, tokens: int) -> tuple[float, ...]:
        asked.append((layer, tokens))
        return (0.5, 0.5, 0.5)

    x = structured_input(300, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    selector = selector_of("dpxa", thresholds)
    selector.new_state(replace(spec_of(x), layer=4, max_tokens=131_072))
    assert asked == [(4, 131_072)]


@pytest.mark.parametrize("name", SCORED)
def test_refuses_a_density_without_thresholds(name: str) -> None:
    with pytest.raises(KernelInputError, match=r"density = 0.08 needs thresholds for each layer and head"):
        selector_of(name, None, density=0.08)
    state = spec_of(structured_input(300, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE))
    for outside in (0, 1):
        asked = selector_of(name, thresholds_of, density=0.08, outside=outside, sink=129, window=300)
        rule = asked.layer_rule(replace(state, layer=3))
        assert rule == Rule("cumulative", rule.threshold, 2, 4, outside=True)
        assert torch.equal(rule.thresholds(3, state.device), torch.tensor(THRESHOLDS[3], device=state.device))


@pytest.mark.parametrize("name", SCORED)
def test_the_share_of_kept_tiles_includes_sink_and_window(name: str) -> None:
    x = structured_input(4096, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    selector = selector_of(name, None, share=0.5, outside=1, sink=1, window=300)
    assert selector.rule == Rule("top_k", 0.5, sink_blocks=1, window_blocks=4)
    mask = selector.select(x, selector.new_state(spec_of(x)), no_phase)
    for row, count_H in enumerate(mask.count_BHN[0].T.tolist()):
        kept = max(-(-(row + 1) // 2), min(row + 1, 5))
        assert all(kept <= count <= kept + 1 for count in count_H), f"row {row}: {count_H}"  # + 1 for a tie


@pytest.mark.parametrize("name", SCORED)
def test_refuses_share_together_with_density(name: str) -> None:
    with pytest.raises(KernelInputError, match=r"^share = 0\.5 and density = 0\.08 exclude each other"):
        PRESETS[name].form(share=0.5, density=0.08)


def test_applies_thresholds_inside_the_delta_correction() -> None:
    x = structured_input(1100, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    densities = []
    for threshold in (1.0, 0.3):
        spec = method_spec("xattention+delta", {"tau": 0.3, "min_tokens": 1000})
        method = build(spec, lambda _layer, _tokens, threshold=threshold: (threshold,) * 3)
        _, counts = method.attend(x, method.new_state(spec_of(x)))
        densities.append(float(counts.computed) / counts.causal)
    assert densities[0] > 1.0 > densities[1]


@pytest.mark.parametrize("thresholds", [(0.5, 0.5), (0.5,) * 4, (0.5, 0.5, 1.5), (0.5, 0.5, float("nan"))])
def test_refuses_thresholds_that_do_not_fit_the_heads(thresholds: tuple[float, ...]) -> None:
    x = structured_input(300, q_heads=3, kv_heads=1, head_dim=16, device=DEVICE)
    selector = selector_of("dpxa", lambda _layer, _tokens: thresholds)
    with pytest.raises(KernelInputError, match=r"layer 5: .* 3 query heads"):
        selector.new_state(replace(spec_of(x), layer=5))


@pytest.mark.parametrize("name", sorted(set(OWN) - set(SCORED)))
def test_methods_without_scores_refuse_thresholds(name: str) -> None:
    with pytest.raises(KernelInputError, match=f"{name} ranks no tiles by a score"):
        build(method_spec(name), thresholds_of)
