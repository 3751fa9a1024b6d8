"""Tests properties of every attention method that can prefill in chunks.

Without a GPU the CPU versions run, with a GPU the kernels. Most inputs are structured, so that methods find
runs to pack and tiles to skip.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from deltafront.kernels.build import Composition, build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.methods import PRESETS, MethodSpec, method_spec, reads_whole_prompts, resume_step
from deltafront.kernels.options import Value
from deltafront.tests.numerics import assert_rows_close, chunk_of, row_errors, spec_of, synchronising_raises
from deltafront.tests.reference.attention import reference_attention
from deltafront.tests.reference.structured import structured_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN = [name for name in PRESETS if PRESETS[name].form.__module__.startswith("deltafront.kernels.")]
"""The package's methods, without those that other tests register."""
METHODS = [name for name in OWN if not reads_whole_prompts(name)]
SELECTING = [name for name in METHODS if PRESETS[name].selector is not None]
SCORED = ("xattention", "dpxa", "delta_xattention")
"""Methods that select tiles by a score and a rule."""
OUTSIDE: dict[str, Value] = {"outside": True, "sink": 129, "window": 129}
FORMS: dict[str, dict[str, Value]] = {
    **{f"{name} outside": OUTSIDE for name in SCORED},
    **{f"{name} share": {} for name in SCORED},
    "dpxa finer": {"q_anchors": 32, "k_anchors": 64, "cos": 0.85, "window": 128, "outside": True},
}
"""Variants of methods: with `outside` and a wider sink and window, with the rule `share`, and `finer`, with
the options of the shipped profile for shorter prompts."""
FILLING = 32_768
"""Prompt length in tokens at which an 8B model's heads fill a GPU."""
CORRECTED = ["streaming+delta", "delta_kv+delta", "dpxa+delta", "dpxa+delta outside"]
LEAN: dict[str, dict[str, Value]] = {
    "streaming": {"window": 256},
    "delta_kv": {"critical": 128, "cos": 0.8},
    "xattention": {"tau": 0.6},
    "dpxa": {"tau": 0.6, "outside": False, "window": 1},
    "delta_xattention": {"tau": 0.8, "cos": 0.8},
    **{name: {"tau": 0.3} for name in FORMS if name.endswith(" outside")},
    **{name: {"share": 0.5, "window": 1} for name in FORMS if name.endswith(" share")},
    "dpxa finer": {"tau": 0.3},
}
"""Options with which each method skips tiles of a prompt of 1,200 tokens."""
FULL: dict[str, dict[str, Value]] = {
    "streaming": {"window": 1 << 20},
    "delta_kv": {"cos": 1.0},
    **{name: {"tau": 1.0} for name in ("xattention", "dpxa")},
    "delta_xattention": {"tau": 1.0, "exact_share": 1.0},
    **{name: {"share": 1.0} for name in FORMS if name.endswith(" share")},
}
"""Options with which each method computes all tiles exactly."""


def options_of(name: str, table: dict[str, dict[str, Value]]) -> dict[str, Value]:
    form = name.replace("+delta", "")
    base = form.partition(" ")[0]
    chosen = {**table.get(base, {}), **FORMS.get(form, {}), **table.get(form, {})}
    if "min_tokens" in PRESETS[base].options:
        chosen["min_tokens"] = 0
    if name != form:
        chosen["gamma"] = 48
    return chosen


def spec_named(name: str, table: dict[str, dict[str, Value]]) -> MethodSpec:
    return method_spec(name.partition(" ")[0], options_of(name, table))


def method_of(name: str, table: dict[str, dict[str, Value]] = LEAN) -> Any:
    return build(spec_named(name, table))


def run(method: Any, x: AttentionInput, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """Compute a prompt in chunks that begin at 0 and at each of `cuts`."""
    state = method.new_state(spec_of(x))
    edges = (0, *cuts, x.q_BHTD.shape[2])
    return torch.cat([method.attend(chunk_of(x, a, b), state)[0] for a, b in pairwise(edges)], dim=2)


# Results are cached: callers must not write into them.
reference = cache(reference_attention)


@cache
def prompt(
    tokens: int = 1200, heads: int = 4, key_heads: int = 2, dim: int = 64, seed: int = 5
) -> AttentionInput:
    return structured_input(tokens, q_heads=heads, kv_heads=key_heads, head_dim=dim, device=DEVICE, seed=seed)


@cache
def at_once(name: str, tokens: int = 1200) -> torch.Tensor:
    """Return a small-budget method's output for a prompt in one chunk."""
    return run(method_of(name), prompt(tokens))


def density(method: Any, x: AttentionInput) -> float:
    counts = method.attend(x, method.new_state(spec_of(x)))[1]
    return float(counts.computed) / counts.causal


@pytest.mark.parametrize("name", [*METHODS, *FORMS])
def test_full_budget_equals_dense_and_small_budgets_skip_tiles(name: str) -> None:
    x = prompt()
    assert_rows_close(run(method_of(name, FULL), x), reference(x))
    assert density(method_of(name, FULL), x) == pytest.approx(1.0, abs=0.02)
    if name != "dense":
        assert density(method_of(name), x) < 0.9
        assert float(row_errors(at_once(name), reference(x)).max()) > 1e-3


@pytest.mark.parametrize("name", [*METHODS, *FORMS, *CORRECTED])
def test_output_never_depends_on_later_keys(name: str) -> None:
    """Replacing keys and values from a block boundary on does not change the rows before it."""
    x = prompt()
    border = 5 * BLOCK
    k, v = x.k_BGSD.clone(), x.v_BGSD.clone()
    k[:, :, border:] = 40 * torch.randn_like(k[:, :, border:])
    v[:, :, border:] = 1e4
    changed = run(method_of(name), replace(x, k_BGSD=k, v_BGSD=v))
    assert_rows_close(changed[:, :, :border], at_once(name)[:, :, :border])


@pytest.mark.parametrize("name", ["dense", "streaming", "delta_kv"])
def test_rows_never_depend_on_later_keys_of_their_block(name: str) -> None:
    """For methods without scores this is true of every row, not only of whole blocks."""
    x = prompt(700)
    border = 5 * BLOCK - 37
    k, v = x.k_BGSD.clone(), x.v_BGSD.clone()
    k[:, :, border:] *= -3
    v[:, :, border:] = 1e4
    changed = run(method_of(name), replace(x, k_BGSD=k, v_BGSD=v))
    assert_rows_close(changed[:, :, :border], run(method_of(name), x)[:, :, :border])


@pytest.mark.parametrize("cuts", [(128,), (384, 512, 1152), (256, 640, 768, 896)])
@pytest.mark.parametrize("name", [*METHODS, *FORMS, *CORRECTED])
def test_prefill_in_chunks_equals_prefill_of_the_whole_prompt(name: str, cuts: tuple[int, ...]) -> None:
    assert_rows_close(run(method_of(name), prompt(1153), cuts), at_once(name, 1153))


@pytest.mark.parametrize("name", [*METHODS, *FORMS, *CORRECTED])
def test_short_prompts_and_one_token_chunks_give_the_same_output(name: str) -> None:
    for tokens, cuts in ((1, ()), (127, ()), (129, (128,)), (641, (128, 640))):
        x = prompt(tokens, heads=2, key_heads=1)
        found = run(method_of(name), x, cuts)
        assert_rows_close(found, run(method_of(name), x))
        assert_rows_close(found[:, :, :BLOCK], reference(x)[:, :, :BLOCK])


@pytest.mark.parametrize("name", [*METHODS, *FORMS, *CORRECTED])
def test_output_does_not_depend_on_the_memory_layout_of_heads(name: str) -> None:
    """Models store q, k and v token by token: (batch, tokens, heads, D)."""
    x = prompt(700)

    def inside(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    y = replace(x, q_BHTD=inside(x.q_BHTD), k_BGSD=inside(x.k_BGSD), v_BGSD=inside(x.v_BGSD))
    assert not y.k_BGSD.is_contiguous()
    method = method_of(name)
    assert_rows_close(run(method, y, cuts=(256, 512)), run(method, x, cuts=(256, 512)))


@pytest.mark.parametrize("group", [3, 4, 8])
@pytest.mark.parametrize("name", [*METHODS, *FORMS])
def test_gqa_equals_attention_with_repeated_keys(name: str, group: int) -> None:
    x = prompt(640, heads=2 * group if group < 8 else 8, key_heads=2 if group < 8 else 1)
    repeated = replace(
        x,
        k_BGSD=x.k_BGSD.repeat_interleave(group, dim=1),
        v_BGSD=x.v_BGSD.repeat_interleave(group, dim=1),
    )
    assert_rows_close(run(method_of(name), x), run(method_of(name), repeated))


@pytest.mark.parametrize("name", [*METHODS, *FORMS])
def test_batch_equals_its_sequences_one_by_one(name: str) -> None:
    one, other = prompt(640, seed=1), prompt(640, seed=2)
    both = AttentionInput.of(
        torch.cat([one.q_BHTD, other.q_BHTD]),
        torch.cat([one.k_BGSD, other.k_BGSD]),
        torch.cat([one.v_BGSD, other.v_BGSD]),
    )
    found = run(method_of(name), both)
    assert_rows_close(found[:1], run(method_of(name), one))
    assert_rows_close(found[1:], run(method_of(name), other))


@cache
def strange(kind: str) -> AttentionInput:
    x = prompt(700, heads=2, key_heads=1)
    if kind == "duplicated rows":
        same = torch.arange(700, device=DEVICE) // 100 * 100
        return replace(x, q_BHTD=x.q_BHTD[:, :, same], k_BGSD=x.k_BGSD[:, :, same])
    if kind == "zero keys":
        return replace(x, k_BGSD=torch.zeros_like(x.k_BGSD))
    if kind == "zero queries":
        return replace(x, q_BHTD=torch.zeros_like(x.q_BHTD))
    return replace(x, q_BHTD=x.q_BHTD * 50)  # large logits


@pytest.mark.parametrize("kind", ["duplicated rows", "zero keys", "zero queries", "large logits"])
@pytest.mark.parametrize("name", [*METHODS, *FORMS])
def test_attention_weights_sum_to_one_on_degenerate_inputs(name: str, kind: str) -> None:
    """If all values are 1, the output is 1. A full budget equals dense attention."""
    x = strange(kind)
    ones = run(method_of(name), replace(x, v_BGSD=torch.ones_like(x.v_BGSD)))
    assert_rows_close(ones, torch.ones_like(ones))
    assert_rows_close(run(method_of(name, FULL), x), reference(x), factor=5)


@pytest.mark.parametrize("name", SELECTING)
def test_masks_always_keep_diagonal_and_sink(name: str) -> None:
    x = prompt()
    least: dict[str, Value] = {"window": 1} if name == "streaming" else {"tau": 0.01, "window": 1}
    method = method_of(name, {name: least})
    assert isinstance(method, Composition)
    assert method.selector is not None
    mask = method.selector.select(x, method.selector.new_state(spec_of(x)), no_phase)
    count_BHN = mask.count_BHN.long()
    diagonal_BHN = mask.index_BHNM.long().gather(3, count_BHN[..., None] - 1)[..., 0]
    assert torch.equal(diagonal_BHN, torch.arange(x.query_blocks, device=DEVICE).expand_as(diagonal_BHN))
    assert bool((mask.index_BHNM[..., 0] == 0).all())
    assert float(count_BHN[..., 5:].double().mean()) < 4


def test_prompts_of_at_most_min_tokens_use_dense_attention() -> None:
    x = prompt(600)
    method = build(method_spec("streaming", {"window": 128, "min_tokens": 600}))
    assert_rows_close(run(method, x, (128, 256)), reference(x))
    longer = prompt(601)
    assert float(row_errors(run(method, longer), reference(longer)).max()) > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*METHODS, *FORMS, *CORRECTED])
def test_attention_never_synchronises_with_the_device(name: str) -> None:
    x = prompt()
    method = method_of(name)
    method.attend(x, method.new_state(spec_of(x)))  # compiles
    state = method.new_state(spec_of(x))
    with synchronising_raises():
        for begin, end in ((0, 512), (512, 1200)):
            method.attend(chunk_of(x, begin, end), state)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["dense", "dpxa", "dpxa share", "dpxa finer", "xattention", "delta_kv"])
def test_repeated_runs_give_the_same_bits(name: str) -> None:
    """The prompt is long enough to fill a GPU, so that a race would sometimes change the output."""
    x = structured_input(FILLING, device=DEVICE, dtype=torch.bfloat16, seed=5)
    chunk, method = chunk_of(x, FILLING // 4 * 3, FILLING), method_of(name)
    first_BHTD, first = method.attend(chunk, method.new_state(spec_of(x)))
    for number in range(1, 100):
        again_BHTD, again = method.attend(chunk, method.new_state(spec_of(x)))
        assert float(again.computed) == float(first.computed), number
        assert torch.equal(again_BHTD, first_BHTD), number


@pytest.mark.parametrize("name", [*METHODS, *FORMS, *CORRECTED])
def test_prefill_resumes_with_a_new_state_and_gives_the_same_bits(name: str) -> None:
    """Resuming needs only the keys and values, not the state of the process that computed them."""
    x, cuts = prompt(), (384, 640, 768, 1152)
    step = resume_step(spec_named(name, LEAN))
    assert step == (384 if name in CORRECTED else BLOCK)
    whole = run(method_of(name), x, cuts)
    for start in (cut for cut in cuts if cut % step == 0):
        method, edges = method_of(name), (*(cut for cut in cuts if cut >= start), x.q_BHTD.shape[2])
        state = method.new_state(spec_of(x))
        rest = [method.attend(chunk_of(x, a, b), state)[0] for a, b in pairwise(edges)]
        assert torch.equal(torch.cat(rest, dim=2), whole[:, :, start:])


def test_correction_cannot_resume_between_two_dense_rows() -> None:
    """Rows before the next dense row need a difference that depends on earlier queries."""
    x, method = prompt(), method_of("streaming+delta")
    whole = run(method, x, (640,))
    rest = method.attend(chunk_of(x, 640, 1200), method.new_state(spec_of(x)))[0]
    assert not torch.equal(rest[:, :, :32], whole[:, :, 640:672])
    assert torch.equal(rest[:, :, 32:], whole[:, :, 672:])
