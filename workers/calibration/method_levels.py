"""Thresholds of a profile's levels: curves and costs of some documents, allocated to a mean density.

Shape suffixes as in `curves.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from ...kernels.build import build, options_for, part_of
from ...kernels.interface import AttentionInput, Coverage
from ...kernels.methods import MethodSpec, method_spec, registered
from ...kernels.options import ScoredOptions
from ...kernels.selectors.scored import ScoredSelector
from ..model.calibrated.levels import levels_of
from ..model.calibrated.profile import Level, MethodLevels, Profile, shaping_options
from ..model.decoder.stack import LayerStack
from .allocation import allocate
from .curves import Curves, curves
from .dense_pass import embedded, read_densely, state_spec
from .probes import ANSWER_WEIGHT, Document
from .sensitivity import LayerCosts, layer_costs
from .thresholds import adjusted_quotas, least_adjusted

Allocation = Literal["marginal", "threshold"]
"""How heads get their quotas: by marginal gain (`allocation.py`) or as XAttention does (`thresholds.py`)."""

COSTED_AT = 0.5
"""The quota at which a layer's cost is measured: about that of a mean density of 8% at 128K."""

GROWTH = 0.4
"""Shorter prompts get a larger share of their tiles: a level of density d, made for the longest documents,
means d (longest / tokens)^GROWTH for others, so the tiles of a row still grow with its length."""

Told = Callable[[str], None]


def method_levels(
    stack: LayerStack,
    probes: Mapping[int, Sequence[Document]],
    method: MethodSpec,
    densities: Sequence[float],
    told: Told = lambda _what: None,
    allocation: Allocation = "marginal",
    answer_weight: float = ANSWER_WEIGHT,
    profile: Profile | None = None,
) -> MethodLevels:
    """Levels of these densities for each length of document. Every document is read densely once for each of
    the model's layers, and once more; `told` is called with what is being done.

    probes: length in tokens → documents of that length. answer_weight: what the divergence at the tokens of
    answers counts beside that of the tail. profile: what they are to be added to; a density
    means itself at the longest prompts of its old and new levels. Raises ValueError for a method that ranks
    no tiles by a score, and for a density that sink and window alone, or the least thresholds, exceed.
    """
    require_thresholds(method)
    shaping = shaping_options(method)
    costed = method_spec(method.name, {**shaping, "outside": True, "tau": COSTED_AT, "min_tokens": 0})
    had = [] if profile is None else levels_of(profile, method)
    levels = []
    for tokens, documents in sorted(probes.items()):
        found, costs = [], []
        for number, document in enumerate(documents):
            told(f"{tokens} tokens, document {number + 1} of {len(documents)}: errors of heads")
            found.append(curves(stack, document, selector_of(costed)))
            told(f"{tokens} tokens, document {number + 1} of {len(documents)}: costs of layers")
            costs.append(layer_costs(stack, document, build(costed)))
        for density in densities:
            longest = max([*probes, *(one.tokens for one in had if one.density == density)])
            share = min(1.0, density * (longest / tokens) ** GROWTH)
            told(f"{tokens} tokens: thresholds for a density of {share:.3f}")
            thresholds = head_thresholds(found, costs, share, allocation, answer_weight)
            really = realised(stack, documents, costed, thresholds)
            aimed = max(share * min(1.0, share / really), least_density(found, allocation))
            thresholds = head_thresholds(found, costs, min(share, aimed), allocation, answer_weight)
            levels.append(Level(density=density, tokens=tokens, share=round(share, 4), amounts=thresholds))
    return MethodLevels(method=method.name, options=shaping, levels=tuple(levels))


def require_thresholds(method: MethodSpec) -> None:
    """Raises ValueError for a method that ranks no tiles by a score."""
    if not issubclass(registered(method).form, ScoredOptions) or method.correction:
        raise ValueError(f"{method.name} has no thresholds to calibrate: it ranks no tiles by a score")


def least_density(found: Sequence[Curves], allocation: Allocation) -> float:
    """What sink and window alone take, or the least thresholds; a mean over heads and documents."""
    density_LHI = torch.stack([one.density_LHI for one in found]).mean(0)
    if allocation == "threshold":
        least = least_adjusted(density_LHI.flatten(0, 1), found[0].quotas)
    else:
        least = float(density_LHI.amin(-1).double().mean())
    return least * (1 + 1e-6)


def realised(
    stack: LayerStack,
    documents: Sequence[Document],
    method: MethodSpec,
    thresholds: Sequence[Sequence[float]],
) -> float:
    """The density over documents that are read with these thresholds. It is more than on dense activations,
    from which the thresholds come."""
    sparse = build(
        method_spec(method.name, {**method.values, "density": 1.0}), lambda layer, _: thresholds[layer]
    )
    seen: list[Coverage] = []

    def look(layer: int, x: AttentionInput) -> torch.Tensor:
        out_BHTD, covered = sparse.attend(x, sparse.new_state(state_spec(x, layer)))
        seen.append(covered)
        return out_BHTD

    for document in documents:
        read_densely(stack, embedded(stack, document.ids), look)
    return float(sum(covered.computed.sum() for covered in seen)) / sum(covered.causal for covered in seen)


def selector_of(method: MethodSpec) -> ScoredSelector:
    """The selector of a method that ranks tiles by a score."""
    preset = registered(method)
    assert preset.selector is not None
    selector = part_of(preset.selector)(options_for(method))
    assert isinstance(selector, ScoredSelector)
    return selector


def head_thresholds(
    found: Sequence[Curves],
    costs: Sequence[LayerCosts],
    share: float,
    allocation: Allocation = "marginal",
    answer_weight: float = ANSWER_WEIGHT,
) -> tuple[tuple[float, ...], ...]:
    """The quota of each layer and head so that the mean density over documents is at most `share` and the
    predictions change least: a head's error counts as much as its layer's errors together cost, in the tail
    where the text is looked at anywhere, in answers where it holds what is asked for."""
    density_LHI = torch.stack([one.density_LHI for one in found]).mean(0)
    quotas = found[0].quotas

    def loss(errors: list[torch.Tensor], costs: list[torch.Tensor]) -> torch.Tensor:
        error_LHI = torch.stack(errors).mean(0)
        error_L = error_LHI[..., quotas.index(COSTED_AT)].sum(1)
        # Where that quota drops nothing, a layer costs nothing, and no quota has an error.
        weight_L = torch.stack(costs).mean(0) / torch.where(error_L > 0, error_L, 1.0)
        return error_LHI * weight_L[:, None, None]

    loss_LHI = loss([one.error_LHI for one in found], [one.tail_L for one in costs])
    loss_LHI += answer_weight * loss([one.fact_error_LHI for one in found], [one.answer_L for one in costs])
    layers, heads, _ = loss_LHI.shape
    density_HI, loss_HI = density_LHI.flatten(0, 1), loss_LHI.flatten(0, 1)
    if allocation == "threshold":
        chosen = adjusted_quotas(density_HI, loss_HI, quotas, share)
    else:
        curves_of = zip(density_HI.tolist(), loss_HI.tolist(), strict=True)
        chosen = allocate([list(zip(*curve, quotas, strict=True)) for curve in curves_of], share)
    return tuple(tuple(chosen[heads * layer : heads * (layer + 1)]) for layer in range(layers))
