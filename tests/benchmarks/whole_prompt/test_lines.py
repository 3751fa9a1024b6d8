"""Tests masses of vertical and slash lines, CPU version and kernel, and the baselines MInference and
FlexPrefill.

Masses are compared entry by entry, relative to each entry, so that small masses count, too. Shape suffixes
are those of `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.benchmarks.paper_forms.baselines import BlockPoolSelector
from deltafront.benchmarks.paper_forms.methods import BlockPoolOptions
from deltafront.benchmarks.whole_prompt import flex, lines, lines_kernel, vertical_slash
from deltafront.benchmarks.whole_prompt.flex import FlexSelector
from deltafront.benchmarks.whole_prompt.line_selector import LineSelector
from deltafront.benchmarks.whole_prompt.methods import FlexOptions, VerticalSlashOptions
from deltafront.benchmarks.whole_prompt.oracle import flex_tiles, line_masses, vertical_slash_tiles
from deltafront.benchmarks.whole_prompt.vertical_slash import VerticalSlashSelector
from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput, KernelInputError, TileMask, no_phase
from deltafront.kernels.methods import PRESETS, method_spec, reads_whole_prompts
from deltafront.kernels.options import Value
from deltafront.kernels.selectors.rules import cpu as rules
from deltafront.tests.numerics import (
    assert_rows_close,
    poisoned_empty,
    random_input,
    spec_of,
    synchronising_raises,
    tiles,
)
from deltafront.tests.reference.attention import reference_attention
from deltafront.tests.reference.structured import structured_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
FULL: dict[str, dict[str, Value]] = {
    "vertical_slash": {"verticals": 1 << 16, "slashes": 1 << 16},
    "flex": {"gamma_flex": 1.0},
}
SELECTORS: dict[str, Callable[[], LineSelector]] = {
    "vertical_slash": lambda: VerticalSlashSelector(VerticalSlashOptions(verticals=200, slashes=200)),
    "flex_lines": lambda: FlexSelector(FlexOptions(gamma_flex=0.7, tau_flex=0.0)),
    "flex_aware": lambda: FlexSelector(FlexOptions(gamma_flex=0.7, tau_flex=1.0)),
    "flex_mixed": lambda: FlexSelector(FlexOptions(gamma_flex=0.7, tau_flex=0.47)),
}


def sample(tokens: int, dtype: torch.dtype = torch.float32, **changes: Any) -> AttentionInput:
    settings: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 32, "seed": tokens, **changes}
    return structured_input(tokens, dtype=dtype, device=DEVICE, **settings)


def small_sample(tokens: int, **changes: Any) -> AttentionInput:
    return sample(tokens, head_dim=16, **changes)


def select(selector: LineSelector, x: AttentionInput) -> TileMask:
    return selector.select(x, selector.new_state(spec_of(x)), no_phase)


def kernel_masses(x: AttentionInput, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    with poisoned_empty():
        return lines_kernel.kernel_line_masses(x, queries)


def assert_masses_equal_the_cpu_form(x: AttentionInput, queries: int, factor: float = 1.0) -> None:
    taken = min(queries, x.q_BHTD.shape[2])
    masses = kernel_masses(x, queries)
    for mass_BHM, expected_BHM in zip(masses, lines.cpu_line_masses(x, queries), strict=True):
        assert_rows_close(mass_BHM[..., None], expected_BHM[..., None], factor=factor)
        total_BH = mass_BHM.double().sum(-1)
        torch.testing.assert_close(total_BH, torch.full_like(total_BH, taken), rtol=1e-5 * factor, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("queries", "head_dim"), [(64, 64), (64, 128), (128, 64), (128, 128), (128, 16)])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (4, 2)])
def test_line_mass_kernel_equals_the_cpu_version(
    queries: int, head_dim: int, q_heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    x = sample(343, dtype, batch=2, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    assert_masses_equal_the_cpu_form(x, queries)


@pytest.mark.parametrize(("tokens", "queries"), [(300, 64), (200, 128), (50, 64)])
def test_line_masses_on_the_cpu_equal_the_oracle(tokens: int, queries: int) -> None:
    x = sample(tokens, q_heads=2, head_dim=16)
    for mass_BHM, expected_BHM in zip(
        lines.cpu_line_masses(x, queries), line_masses(x, queries), strict=True
    ):
        assert_rows_close(mass_BHM.cpu()[..., None], expected_BHM[..., None], dtype=torch.float32)


@pytest.mark.parametrize("tokens", [150, 40])
def test_column_and_diagonal_masses_equal_sums_over_all_pairs(tokens: int) -> None:
    mass_BHLS = lines.last_attention(sample(tokens, head_dim=16), 64)
    vertical_BHS, slash_BHS = lines.single_line_masses(mass_BHLS)
    first = tokens - mass_BHLS.shape[2]
    for h in range(2):
        columns, distances = torch.zeros(tokens), torch.zeros(tokens)
        for row, mass_S in enumerate(mass_BHLS[0, h].cpu()):
            for key in range(first + row + 1):
                columns[key] += mass_S[key]
                distances[first + row - key] += mass_S[key]
        torch.testing.assert_close(vertical_BHS[0, h].cpu(), columns)
        torch.testing.assert_close(slash_BHS[0, h].cpu(), distances)


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("tokens", [1, 40, 63, 64, 65, 127, 128, 129, 192, 256, 383])
def test_masses_are_correct_for_any_position_of_the_last_queries(tokens: int, queries: int) -> None:
    """Some prompts have fewer rows than the last queries. Bands begin anywhere in a tile."""
    x = random_input(tokens, q_heads=3, head_dim=16, seed=tokens, device=DEVICE)
    assert_masses_equal_the_cpu_form(x, queries)


@pytest.mark.parametrize("factor", [0.0, 8.0, 60.0])
def test_masses_are_correct_for_large_and_zero_logits(factor: float) -> None:
    """With logits up to tens of thousands one key gets all mass of a row, without overflow."""
    x = sample(300)
    x = replace(x, q_BHTD=x.q_BHTD * factor, k_BGSD=x.k_BGSD * max(factor, 1.0))
    assert_masses_equal_the_cpu_form(x, 128, factor=max(1.0, 2 * factor))


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_masses_are_correct_for_any_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(1100, head_dim=16)
    monkeypatch.setattr(lines_kernel, "_SPLITS", splits)
    assert_masses_equal_the_cpu_form(x, 128)
    monkeypatch.undo()
    assert_masses_equal_the_cpu_form(sample(4229, q_heads=1, head_dim=16), 64)


def test_masses_are_correct_for_any_strides() -> None:
    """Queries are stored token by token, as a projection writes them, and keys in a longer KV cache."""
    x = sample(300, batch=2, q_heads=4, kv_heads=2)
    q_BHTD = x.q_BHTD.transpose(1, 2).contiguous().transpose(1, 2)
    cache = torch.full((2, 3, 700, 64), float("nan"), device=DEVICE)
    cache[:, 1:, 200:500, 16:48] = x.k_BGSD
    k_BGSD = cache[:, 1:, 200:500, 16:48]
    strided = AttentionInput.of(q_BHTD, k_BGSD, x.v_BGSD)
    for mass_BHM, expected_BHM in zip(kernel_masses(strided, 64), kernel_masses(x, 64), strict=True):
        assert torch.equal(mass_BHM, expected_BHM)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("tokens", [90, 1100])
def test_cpu_and_kernel_give_the_same_mask(name: str, tokens: int) -> None:
    x = sample(tokens, batch=2, q_heads=3)
    selector = SELECTORS[name]()
    with poisoned_empty():
        mask = selector.kernel_select(x, no_phase)
    assert tiles(mask) == tiles(selector.cpu_select(x, no_phase))
    for row, kept in enumerate(tiles(mask)):
        diagonal = row % x.query_blocks
        assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == diagonal
    if tokens > 1000:
        assert int(mask.count_BHN.sum()) < 0.9 * 2 * 3 * 45


def test_mask_keeps_the_lines_with_the_largest_masses() -> None:
    """The mask must equal the one that follows from the kernel's rounded masses. Inputs have 16 bits."""
    x = sample(900, torch.float16, q_heads=3)
    with poisoned_empty():
        slashed = SELECTORS["vertical_slash"]().kernel_select(x, no_phase)
        mixed = SELECTORS["flex_mixed"]().kernel_select(x, no_phase)
        score_BHNM = BlockPoolSelector(BlockPoolOptions()).kernel_scores(x, None, no_phase)
    masses = kernel_masses(x, 64)
    kept_BHNM = vertical_slash.choose(*masses, 200, 200)
    assert tiles(slashed) == tiles(rules.select(lines.kept_scores(kept_BHNM), lines.KEPT, 0))
    kept_BHNM = flex.choose(*kernel_masses(x, 128), score_BHNM, 0.7, 0.47)
    assert tiles(mixed) == tiles(rules.select(lines.kept_scores(kept_BHNM), lines.KEPT, 0))


def test_flexprefill_chooses_different_patterns_for_heads() -> None:
    """The batch has two prompts. tau is between the divergences of their heads, at most 0.43 and 0.52."""
    x = sample(1100, batch=2, q_heads=3)
    kept = {name: tiles(SELECTORS[name]().cpu_select(x, no_phase)) for name in SELECTORS}
    assert kept["flex_mixed"] not in (kept["flex_lines"], kept["flex_aware"])


def test_vertical_slash_keeps_a_planted_column() -> None:
    """Every query attends to key 150, at distances 886 to 949 from the last 64 queries, mostly in band 7."""
    q, k = torch.zeros(1, 1, 1100, 16), torch.zeros(1, 1, 1100, 16)
    q[..., 8], k[0, 0, 150, 8] = 8.0, 8.0
    x = AttentionInput.of(q, k, torch.zeros_like(k))
    rows = tiles(select(VerticalSlashSelector(VerticalSlashOptions(verticals=1, slashes=1)), x))
    for n, kept in enumerate(rows):
        banded = {m for m in (n - 7, n - 8) if m >= 0}
        assert set(kept) == banded | {0, n} | ({1} if n else set())


def test_vertical_slash_keeps_a_planted_diagonal() -> None:
    """Every query attends to the key 300 tokens earlier, in band 2, which crosses two tiles of a row."""
    rates = torch.tensor([0.8, 0.49, 0.3, 0.18])
    angle = torch.arange(1100)[:, None] * rates
    q, k = torch.zeros(1, 1, 1100, 16), torch.zeros(1, 1, 1100, 16)
    k[0, 0, :, :8] = 6 * torch.cat([angle.cos(), angle.sin()], -1)
    q[0, 0, :, :8] = 6 * torch.cat([(angle - 300 * rates).cos(), (angle - 300 * rates).sin()], -1)
    x = AttentionInput.of(q, k, torch.zeros_like(k))
    rows = tiles(select(VerticalSlashSelector(VerticalSlashOptions(verticals=1, slashes=1)), x))
    columns = set()
    for n, kept in enumerate(rows):
        banded = {m for m in (n - 2, n - 3) if m >= 0}
        assert banded <= set(kept)
        columns |= set(kept) - banded - {0, n}
    assert len(columns) <= 1


@pytest.mark.parametrize("tokens", [300, 90])
def test_flexprefill_and_vertical_slash_equal_the_oracles(tokens: int) -> None:
    x = small_sample(tokens, q_heads=4, kv_heads=2)
    slashed = VerticalSlashSelector(VerticalSlashOptions(verticals=128, slashes=128))
    wanted = [sorted(row) for head in vertical_slash_tiles(x, 128, 128) for row in head]
    assert tiles(select(slashed, x)) == wanted
    kept = []
    for tau in (0.0, 0.3, 1.0):
        found = tiles(select(FlexSelector(FlexOptions(gamma_flex=0.6, tau_flex=tau)), x))
        assert found == [sorted(row) for head in flex_tiles(x, 0.6, tau) for row in head]
        kept.append(found)
    assert tokens < 128 or kept[0] != kept[2]


def test_flexprefill_gamma_sets_the_budget_and_tau_the_pattern() -> None:
    x = small_sample(1000)
    everything = select(FlexSelector(FlexOptions(gamma_flex=1.0, tau_flex=1.0)), x)
    assert everything.count_BHN[0, 0].tolist() == list(range(1, 9))
    aware = select(FlexSelector(FlexOptions(gamma_flex=0.6, tau_flex=1.0)), x)
    in_lines = select(FlexSelector(FlexOptions(gamma_flex=0.6, tau_flex=0.0)), x)
    assert tiles(aware) != tiles(in_lines)
    assert int(aware.count_BHN.sum()) < int(everything.count_BHN.sum())


def test_refuses_a_chunk_of_a_prompt() -> None:
    for baseline in (
        VerticalSlashSelector(VerticalSlashOptions(verticals=10, slashes=10)),
        FlexSelector(FlexOptions()),
    ):
        with pytest.raises(KernelInputError, match="whole prompt"):
            select(baseline, random_input(300, head_dim=16, prompt_tokens=400, device=DEVICE))


def test_ties_between_lines_go_to_the_lowest_index() -> None:
    mass_BHM = torch.tensor([[[1.0, 2.0, 1.0, 1.0, 2.0, 1.0]]], device=DEVICE)
    assert lines.heaviest(mass_BHM, 300).nonzero()[:, 2].tolist() == [0, 1, 4]
    assert lines.heaviest(mass_BHM, 10_000).all()
    assert lines.heaviest_share(mass_BHM, 0.6).nonzero()[:, 2].tolist() == [0, 1, 4]
    assert lines.heaviest_share(mass_BHM, 1.0).all()


@pytest.mark.parametrize("name", FULL)
def test_a_full_budget_equals_dense_attention(name: str) -> None:
    whole = {name for name in PRESETS if reads_whole_prompts(name)}
    assert set(FULL) == whole - {"streaming_smoothed"}, "whose dense rows are never all"
    x = sample(700, head_dim=64)
    method = build(method_spec(name, {**FULL[name], "min_tokens": 0}))
    out_BHTD, counts = method.attend(x, method.new_state(spec_of(x)))
    assert_rows_close(out_BHTD, reference_attention(x))
    assert float(counts.computed) == counts.causal
    assert counts.scored_share == 0.0


@pytest.mark.parametrize("name", SELECTORS)
def test_vertical_slash_selectors_refuse_bad_inputs(name: str) -> None:
    x, selector = sample(200), SELECTORS[name]()
    with pytest.raises(KernelInputError, match="scale"):
        selector.select(replace(x, scale=-1.0), None, no_phase)
    elsewhere = AttentionInput.of(*(t.to("meta") for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)))
    with pytest.raises(KernelInputError, match="cpu or cuda"):
        selector.select(elsewhere, None, no_phase)
    with pytest.raises(KernelInputError, match="head dimension 24"):
        selector.kernel_select(random_input(200, head_dim=24, device=DEVICE), no_phase)
    with pytest.raises(KernelInputError, match="64 or 128"):
        lines_kernel.kernel_line_masses(x, 32)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FULL)
def test_selection_never_synchronises_with_the_device(name: str) -> None:
    x = sample(3000, torch.bfloat16, head_dim=64)
    method = build(method_spec(name, {"min_tokens": 0}))
    method.attend(x, method.new_state(spec_of(x)))  # compiles
    state = method.new_state(spec_of(x))
    with synchronising_raises():
        method.attend(x, state)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", SELECTORS)
def test_vertical_slash_selectors_do_not_store_all_logits(name: str) -> None:
    x, selector = sample(65_536, torch.bfloat16, q_heads=4, head_dim=128), SELECTORS[name]()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    selector.select(x, None, no_phase)
    assert torch.cuda.max_memory_allocated() - before < 4 * 64 * 65_536 * 4
