"""The number of runs of similar keys in a block, against a scan of the same keys, and its report."""

from __future__ import annotations

import random

import pytest
import torch

from deltafront.kernels.anchor_scan import cpu_scan
from deltafront.kernels.build import build, runs_a_block
from deltafront.kernels.interface import AttentionInput, StateSpec
from deltafront.kernels.methods import method_spec
from deltafront.workers.calibration.method_levels import runs_by_layer
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.calibrated.profile import Profile, ProfiledModel
from deltafront.workers.model.calibrated.runs import describe_runs, few_runs_note
from deltafront.workers.model.decoder.stack import LayerStack

TOKENS = 1024


def keys() -> torch.Tensor:
    """Make keys that repeat 1 to 40 times, for two heads."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    repeats = torch.tensor([rng.randint(1, 40) for _ in range(TOKENS)])
    rows_SD = torch.randn(2, TOKENS, 16, generator=generator)
    return torch.stack([one.repeat_interleave(repeats, 0)[:TOKENS] for one in rows_SD])[None]


@pytest.mark.parametrize(
    ("method", "options", "chunk", "cap"),
    [
        ("dpxa", {"min_tokens": 0, "centred": 0, "cos": 0.99, "k_anchors": 32}, 128, 32),
        ("dpxa+delta", {"min_tokens": 0, "centred": 0, "cos": 0.99, "k_anchors": 8}, 128, 8),
        ("delta_xattention", {"min_tokens": 0, "cos": 0.99}, 128, 128),
        ("delta_kv", {"min_tokens": 0, "cos": 0.99}, 512, 512),
    ],
)
@pytest.mark.parametrize("windows", [{}, {1: 256}])
def test_runs_per_block_equal_those_of_an_anchor_scan(
    method: str, options: dict[str, float], chunk: int, cap: int, windows: dict[int, int]
) -> None:
    k_BGSD = keys()
    q_BHTD = torch.randn(1, 4, TOKENS, 16, generator=torch.Generator().manual_seed(2))
    attention = build(method_spec(method, options), windows=windows)
    spec = StateSpec(1, 4, 2, 16, TOKENS, device=torch.device("cpu"), dtype=torch.float32, layer=0)
    state = attention.new_state(spec)
    assert runs_a_block(state) is None
    for start in range(0, TOKENS, 512):
        x = AttentionInput.of(
            q_BHTD[:, :, start : start + 512],
            k_BGSD[:, :, : start + 512],
            k_BGSD[:, :, : start + 512],
            q_start=start,
            prompt_tokens=TOKENS,
        )
        attention.attend(x, state)
    expected = cpu_scan(k_BGSD, 0.99, chunk).runs_BGC.clamp(max=cap).float().mean() * 128 / chunk
    assert runs_a_block(state) == pytest.approx(float(expected))


@pytest.mark.parametrize(("method", "runs"), [("dpxa", True), ("xattention", False)])
def test_runs_of_similar_keys_are_counted_by_layer(tiny_stack: LayerStack, method: str, runs: bool) -> None:
    document = Document(random.Random(1).choices(range(199), k=400), [])
    found = runs_by_layer(tiny_stack, document, method_spec(method))
    assert len(found) == tiny_stack.config.layers
    assert all((count is not None and 1 <= count <= 32) if runs else count is None for count in found)


def test_start_warns_of_layers_with_few_runs_of_similar_keys() -> None:
    runs = {"dpxa": (9.25, None, 1.5, 3.9), "delta_kv": (4.0, None, 4.0, 4.0)}
    profile = Profile(
        format=1, model=ProfiledModel(name="a", digest="0" * 64), texts=(), prefill=(), runs=runs
    )
    few = "fewer than 4 runs of similar keys a block in layers 2, 3"
    assert few_runs_note(profile, "dpxa+delta").startswith(f"dpxa+delta: {few}")
    assert few_runs_note(profile, "delta_kv") == few_runs_note(profile, "dense") == ""
    assert few_runs_note(None, "dpxa") == ""
    said = describe_runs("dpxa", runs["dpxa"])
    assert said == f"dpxa: 4.9 runs of similar keys a block, by layer 9.2 - 1.5 3.9; {few}"
    assert describe_runs("xattention", (None, None)) == ""
