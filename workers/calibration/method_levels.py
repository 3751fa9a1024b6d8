"""Makes a profile's levels: measures error curves and layer costs on documents, then chooses each head's
quota for each mean density."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Literal

import torch

from deltafront.kernels.build import build, options_for, part_of, runs_a_block
from deltafront.kernels.interface import AttentionInput, TileCounts
from deltafront.kernels.methods import MethodSpec, method_spec, registered
from deltafront.kernels.options import ScoredOptions
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.workers.calibration.allocation import allocate
from deltafront.workers.calibration.curves import Curves, curves, forced_density
from deltafront.workers.calibration.dense_pass import embedded, read_densely, state_spec
from deltafront.workers.calibration.probes import ANSWER_WEIGHT, Document
from deltafront.workers.calibration.sensitivity import LayerCosts, layer_costs
from deltafront.workers.calibration.thresholds import adjusted_quotas, least_adjusted
from deltafront.workers.model.calibrated.levels import levels_of
from deltafront.workers.model.calibrated.profile import Level, MethodLevels, Profile, shaping_options
from deltafront.workers.model.decoder.stack import LayerStack

Allocation = Literal["marginal", "threshold"]
"""`marginal`: by marginal gain (`allocation.py`). `threshold`: as XAttention does (`thresholds.py`)."""

COSTED_AT = 0.5
"""The quota at which the layers' costs are measured. At 128K tokens its mean density is about 8%."""

GROWTH = 0.4
"""A level's density d holds for the longest documents. At `tokens` tokens it means the density
d · (longest / tokens)^GROWTH, because a row has fewer tiles there."""

Told = Callable[[str], None]


def method_levels(
    stack: LayerStack,
    probes: Mapping[int, Sequence[Document]],
    method: MethodSpec,
    densities: Sequence[float],
    *,
    tell: Told = lambda _what: None,
    allocation: Allocation = "marginal",
    answer_weight: float = ANSWER_WEIGHT,
    profile: Profile | None = None,
) -> MethodLevels:
    """Calibrate each head's thresholds for these mean densities, at each document length.

    Args:
        probes: The documents, by length in tokens. Each is prefilled once per layer, and once more.
        profile: An earlier profile, whose lengths also count when the longest length is determined.

    Returns:
        The levels. A density below the least that the documents' heads reach has none, and `tell` says so.

    Raises:
        ValueError: The method does not rank tiles by a score, or a density is below that of sink and window
            alone, which are both found before the first measurement. Or no density is left.
    """
    require_thresholds(method)
    shaping = shaping_options(method)
    costed = method_spec(method.name, {**shaping, "outside": True, "tau": COSTED_AT, "min_tokens": 0})
    old = [] if profile is None else levels_of(profile, method)
    levels = []
    targets = {
        (tokens, density): _target(
            density, tokens, [*probes, *(a.tokens for a in old if a.density == density)]
        )
        for tokens in probes
        for density in densities
    }
    if allocation == "marginal":
        _refuse_too_sparse(targets, probes, selector_of(costed).rule)
    for tokens, documents in sorted(probes.items()):
        measured, costs = [], []
        for number, document in enumerate(documents, 1):
            which = f"{tokens} tokens, document {number} of {len(documents)}"
            tell(f"{which}: errors of heads")
            measured.append(curves(stack, document, selector_of(costed)))
            tell(f"{which}: costs of layers")
            costs.append(layer_costs(stack, document, build(costed)))
        for density in densities:
            target, least = targets[tokens, density], least_density(measured, allocation)
            if target < least:
                tell(f"{tokens} tokens: no thresholds are as sparse as {target:.4f}, only as {least:.4f}")
                continue
            tell(f"{tokens} tokens: thresholds for a density of {target:.3f}")
            thresholds = placed(head_thresholds(measured, costs, target, allocation, answer_weight), stack)
            really = realised(stack, documents, costed, thresholds)
            aimed = max(target * min(1.0, target / really), least)
            fewer = head_thresholds(measured, costs, min(target, aimed), allocation, answer_weight)
            thresholds = placed(fewer, stack)
            levels.append(Level(density=density, tokens=tokens, share=round(target, 4), amounts=thresholds))
    if not levels:
        sizes = ", ".join(map(str, sorted(probes)))
        raise ValueError(
            f"no level can be calibrated at {sizes} tokens: it takes a higher density or longer prompts"
        )
    return MethodLevels(method=method.name, options=shaping, levels=tuple(levels))


def _target(density: float, tokens: int, lengths: Sequence[int]) -> float:
    return min(1.0, density * float((max(lengths) / tokens) ** GROWTH))


def _refuse_too_sparse(
    targets: Mapping[tuple[int, float], float], probes: Mapping[int, Sequence[Document]], rule: Rule
) -> None:
    for (tokens, density), target in targets.items():
        least = fmean(forced_density(len(document.ids), rule) for document in probes[tokens])
        if target < least:
            raise ValueError(
                f"a mean density of {density:g} cannot be had: at {tokens} tokens sink and window alone take "
                f"{least:.4f}"
            )


def placed(thresholds: Sequence[tuple[float, ...]], stack: LayerStack) -> tuple[tuple[float, ...], ...]:
    """Return thresholds for all layers: insert rows of 1.0 for exact layers, which use no thresholds."""
    config, rest = stack.config, iter(thresholds)
    unread = (1.0,) * config.q_heads
    return tuple(unread if layer in config.exact_layers else next(rest) for layer in range(config.layers))


def require_thresholds(method: MethodSpec) -> None:
    if not issubclass(registered(method).form, ScoredOptions) or method.correction:
        raise ValueError(f"{method.name} has no thresholds to calibrate: it ranks no tiles by a score")
    if not registered(method).form.levels_outside:
        raise ValueError(
            f"{method.name}'s levels count all mass, and these would not: in a checkout, "
            "python -m deltafront.benchmarks.paper_forms.coverage makes them by each head's coverage"
        )


def least_density(measured: Sequence[Curves], allocation: Allocation) -> float:
    """Return the lowest mean density that can be reached: with every head at its lowest density (allocation
    `marginal`) or its lowest threshold (`threshold`). A millionth is added for rounding."""
    density_LHI = torch.stack([curve.density_LHI for curve in measured]).mean(0)
    if allocation == "threshold":
        least = least_adjusted(density_LHI.flatten(0, 1), measured[0].quotas)
    else:
        least = float(density_LHI.amin(-1).double().mean())
    return least * (1 + 1e-6)


def realised(
    stack: LayerStack,
    documents: Sequence[Document],
    method: MethodSpec,
    thresholds: Sequence[Sequence[float]],
) -> float:
    """Return the mean density when documents are prefilled with these thresholds.

    It is higher than the density measured during dense prefill. Layers with sliding windows do not count.
    """
    sparse = build(
        method_spec(method.name, {**method.values, "density": 1.0}), lambda layer, _: thresholds[layer]
    )
    seen: list[TileCounts] = []

    def hook(layer: int, x: AttentionInput) -> torch.Tensor | None:
        if layer in stack.config.window_layers:
            return None
        out_BHTD, covered = sparse.attend(x, sparse.new_state(state_spec(x, layer)))
        seen.append(covered)
        return out_BHTD

    for document in documents:
        read_densely(stack, embedded(stack, document.ids), hook)
    return float(sum(covered.computed.sum() for covered in seen)) / sum(covered.causal for covered in seen)


def runs_by_layer(stack: LayerStack, document: Document, method: MethodSpec) -> tuple[float | None, ...]:
    """Prefill a document, and return the mean number of runs of similar keys in a block, by layer."""
    values = {**shaping_options(method), "tau": COSTED_AT, "min_tokens": 0}
    sparse, found = build(method_spec(method.name, values)), dict[int, float | None]()

    def hook(layer: int, x: AttentionInput) -> torch.Tensor | None:
        if layer in stack.config.window_layers:
            return None
        state = sparse.new_state(state_spec(x, layer))
        out_BHTD, _covered = sparse.attend(x, state)
        found[layer] = runs_a_block(state)
        return out_BHTD

    read_densely(stack, embedded(stack, document.ids), hook)
    return tuple(found.get(layer) for layer in range(stack.config.layers))


def selector_of(method: MethodSpec) -> ScoredSelector:
    preset = registered(method)
    assert preset.selector is not None
    selector = part_of(preset.selector)(options_for(method))
    assert isinstance(selector, ScoredSelector)
    return selector


def head_thresholds(
    measured: Sequence[Curves],
    costs: Sequence[LayerCosts],
    density: float,
    allocation: Allocation = "marginal",
    answer_weight: float = ANSWER_WEIGHT,
) -> tuple[tuple[float, ...], ...]:
    """Return each head's quota, for a mean density of at most `density` and the smallest change of
    predictions.

    A head's errors are weighted by the cost of its layer: its error on the text by the cost on the document's
    tail, its error on facts by the cost on answers.
    """
    density_LHI = torch.stack([curve.density_LHI for curve in measured]).mean(0)
    quotas = measured[0].quotas

    def loss(errors: list[torch.Tensor], costs: list[torch.Tensor]) -> torch.Tensor:
        error_LHI = torch.stack(errors).mean(0)
        error_L = error_LHI[..., quotas.index(COSTED_AT)].sum(1)
        # If this quota drops no tile of a layer, the layer has neither cost nor error.
        weight_L = torch.stack(costs).mean(0) / torch.where(error_L > 0, error_L, 1.0)
        return error_LHI * weight_L[:, None, None]

    loss_LHI = loss([curve.error_LHI for curve in measured], [cost.tail_L for cost in costs])
    loss_LHI += answer_weight * loss(
        [curve.fact_error_LHI for curve in measured], [cost.answer_L for cost in costs]
    )
    layers, heads, _ = loss_LHI.shape
    density_HI, loss_HI = density_LHI.flatten(0, 1), loss_LHI.flatten(0, 1)
    if allocation == "threshold":
        chosen = adjusted_quotas(density_HI, loss_HI, quotas, density)
    else:
        points = zip(density_HI.tolist(), loss_HI.tolist(), strict=True)
        chosen = allocate([list(zip(*curve, quotas, strict=True)) for curve in points], density)
    return tuple(tuple(chosen[heads * layer : heads * (layer + 1)]) for layer in range(layers))
