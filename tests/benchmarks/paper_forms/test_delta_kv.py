"""Tests Delta-KV in two phases, with similar, periodic and random anchors, against the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from deltafront.benchmarks.paper_forms.delta_kv import DeltaKVState
from deltafront.benchmarks.paper_forms.oracle import phased_attention
from deltafront.kernels.build import build, options_for, part_of
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, no_phase
from deltafront.kernels.methods import MethodError, load, method_spec, registered, resume_step
from deltafront.tests.numerics import assert_rows_close, chunk_of, poisoned_empty, random_input, spec_of
from deltafront.tests.reference.anchor_scan import run_starts
from deltafront.tests.reference.attention import reference_attention

load("deltafront.benchmarks.paper_forms.methods")

PHASES = [
    {},
    {"counts": 0},
    {"block": 64},
    {"history": 0},
    {"diagonal": 0},
    {"diagonal": 0, "counts": 0},
]
NAMES = ["delta_kv_thesis", "delta_kv_periodic", "delta_kv_random"]


def backend_of(name: str, **options: float):  # type: ignore[no-untyped-def]
    spec = method_spec(name, options)
    return part_of(registered(spec).backend)(options_for(spec))


def sample(tokens: int = 700, **changes: int) -> AttentionInput:
    """Make an input in which every two or three consecutive keys are similar."""
    x = random_input(tokens, q_heads=1, kv_heads=1, head_dim=16, **changes)
    leader = torch.arange(tokens) * 2 // 5 * 5 // 2
    x.k_BGSD.copy_(0.95 * x.k_BGSD[:, :, leader] + 0.2 * x.k_BGSD)
    return x


def starts_of(name: str, x: AttentionInput, state: DeltaKVState) -> list[int]:
    keys = x.k_BGSD.shape[2]
    if name == "delta_kv_thesis":
        return run_starts(x.k_BGSD, 0.8, 512, "cosine")[0]
    if name == "delta_kv_periodic":
        return list(range(0, keys, 3))
    assert state.chance_BGS is not None
    return [place for place in range(keys) if float(state.chance_BGS[0, 0, place]) < 0.4]


OF_NAME: Mapping[str, Mapping[str, float]] = {
    "delta_kv_thesis": {"cos": 0.8},
    "delta_kv_periodic": {"every": 3},
    "delta_kv_random": {"keep": 0.4, "seed": 5},
}


@pytest.mark.parametrize("phases", PHASES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_delta_kv_with_any_options_equals_the_oracle(name: str, phases: dict[str, float]) -> None:
    x = sample()
    backend = backend_of(name, **OF_NAME[name], **phases)
    state = backend.new_state(spec_of(x))
    with poisoned_empty():
        found = backend.attend(x, None, state, no_phase)
    starts = starts_of(name, x, state)
    assert 200 < len(starts) < 400
    expected = phased_attention(x, starts, **{key: int(value) for key, value in phases.items()})
    assert_rows_close(found, expected)


def test_distance_option_groups_keys_by_euclidean_distance() -> None:
    x = sample()
    backend = backend_of("delta_kv_thesis", distance=2.0)
    found = backend.attend(x, None, backend.new_state(spec_of(x)), no_phase)
    (starts,) = run_starts(x.k_BGSD, 2.0, 512, "euclidean")
    assert 100 < len(starts) < 600
    assert_rows_close(found, phased_attention(x, starts))


@pytest.mark.parametrize("diagonal", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_chunks_with_new_states_equals_the_whole_prompt(name: str, diagonal: int) -> None:
    """Each chunk gets a new state, as when the service resumes a prompt."""
    x = random_input(900, q_heads=4, kv_heads=2, head_dim=16, batch=2)
    spec = method_spec(name, {**OF_NAME[name], "diagonal": diagonal, "min_tokens": 0})
    assert resume_step(spec) == BLOCK
    method = build(spec)
    whole, covered = method.attend(x, method.new_state(spec_of(x)))
    tiles = 0.0
    for start, stop in ((0, 384), (384, 512), (512, 900)):
        part = chunk_of(x, start, stop)
        found, seen = method.attend(part, method.new_state(spec_of(x)))
        assert_rows_close(found, whole[:, :, start:stop])
        tiles += float(seen.computed)
    assert tiles == pytest.approx(float(covered.computed))


def test_merging_identical_keys_does_not_change_attention() -> None:
    x = sample()
    leader = torch.arange(700) // 4 * 4
    for kv in (x.k_BGSD, x.v_BGSD):
        kv.copy_(kv[:, :, leader])
    for name, phases in (("delta_kv_thesis", {}), ("delta_kv_thesis", {"diagonal": 0})):
        backend = backend_of(name, cos=0.9999, **phases)
        found = backend.attend(x, None, backend.new_state(spec_of(x)), no_phase)
        assert_rows_close(found, reference_attention(x))
        loose = backend_of(name, cos=0.9999, counts=0, **phases)
        with pytest.raises(AssertionError):
            assert_rows_close(loose.attend(x, None, loose.new_state(spec_of(x)), no_phase), found)


def test_computed_tiles_count_merged_and_exact_keys() -> None:
    x = sample(640)
    backend = backend_of("delta_kv_periodic", every=4, block=64)
    state = backend.new_state(spec_of(x))
    backend.attend(x, None, state, no_phase)
    expected = 0.0
    for n in range(5):  # a block has 32 anchors; a packed block of 64 is safe if its keys are before block n
        safe = n * 32 // 64 * 64
        expected += (safe + (n + 1) * BLOCK - 4 * safe) / BLOCK
    assert float(backend.computed_tiles(x, None, state)) == pytest.approx(expected)


def test_seed_and_layer_determine_random_delta_kv_anchors() -> None:
    x = sample()
    chances = []
    for seed, layer in ((1, 0), (1, 0), (2, 0), (1, 1)):
        backend = backend_of("delta_kv_random", seed=seed)
        chances.append(backend.new_state(replace(spec_of(x), layer=layer)).chance_BGS)
    assert torch.equal(chances[0], chances[1])
    assert not torch.equal(chances[0], chances[2]) and not torch.equal(chances[0], chances[3])


def test_refuses_delta_kv_options_that_leave_no_keys_to_attend_to() -> None:
    with pytest.raises(MethodError, match="leave nothing to attend to"):
        method_spec("delta_kv_thesis", {"history": 0, "diagonal": 0})
    x = random_input(300)
    late = replace(chunk_of(x, 128, 300), q_start=100)
    backend = backend_of("delta_kv_thesis")
    with pytest.raises(KernelInputError, match="not a multiple"):
        backend.attend(late, None, backend.new_state(spec_of(x)), no_phase)
