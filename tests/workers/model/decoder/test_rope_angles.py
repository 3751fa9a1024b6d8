"""Tests RoPE: frequencies against transformers, rotation against complex numbers, far bf16 positions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deltafront.kernels.layers.rope import rotate
from deltafront.tests.numerics import assert_rows_close, row_errors
from deltafront.workers.model.decoder.rope_angles import Rope, inverse_frequencies
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig

from . import tiny_families
from .cases import CUTS, TOKENS, Pages, load_stages, make_case, prefill, table_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (5e5, LLAMA3),
        (5e5, LLAMA3 | {"factor": 32.0}),
        (1e4, {"rope_type": "linear", "factor": 4.0}),
        (1e6, YARN),
        (1e6, YARN | {"attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2}),
        (1e6, YARN | {"truncate": False}),
        (1e6, YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
    ],
)
def test_rope_frequencies_equal_transformers(head_dim: int, theta: float, scaling: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=scaling | {"rope_theta": theta}
    )
    wanted_F, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    found_F, factor = inverse_frequencies(RopeConfig(theta, scaling), head_dim)
    assert factor == pytest.approx(magnitude)
    torch.testing.assert_close(found_F, wanted_F, rtol=1e-6, atol=0)


def test_divides_rope_frequencies_by_gguf_factors() -> None:
    factors = [1.0, 2.0, 4.0, 8.0]
    plain_F, _ = inverse_frequencies(RopeConfig(1e4), 8)
    found_F, _ = inverse_frequencies(RopeConfig(1e4, {"rope_type": "factors", "factors": factors}), 8)
    torch.testing.assert_close(found_F * torch.tensor(factors), plain_F)
    with pytest.raises(ModelError, match="4 frequency factors for 8"):
        inverse_frequencies(RopeConfig(1e4, {"rope_type": "factors", "factors": factors}), 16)


def test_rotation_equals_a_complex_product() -> None:
    rope = Rope(RopeConfig(1e4), 16, "cpu")
    x_THD, positions_T = torch.randn(9, 3, 16), torch.randint(0, 3000, (9,))
    pair = torch.complex(x_THD[..., :8].double(), x_THD[..., 8:].double())
    frequencies_F = 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = pair * torch.exp(1j * positions_T[:, None, None] * frequencies_F)
    wanted = torch.cat([turned.real, turned.imag], dim=-1)
    assert_rows_close(rotate(x_THD, *rope.angles(positions_T)), wanted, dtype=torch.float32)


def test_bf16_scores_depend_only_on_distance_even_at_far_positions() -> None:
    rope = Rope(RopeConfig(8e6), 64, "cpu")
    q, k = torch.randn(64, 1, 64), torch.randn(64, 1, 64)

    def score(at: int, dtype: torch.dtype) -> torch.Tensor:
        q_rotated = rotate(q.to(dtype), *rope.angles(torch.full((64,), at)))
        k_rotated = rotate(k.to(dtype), *rope.angles(torch.full((64,), at - 100)))
        return (q_rotated.float() * k_rotated.float()).sum(-1)

    near = score(100, torch.float32)
    assert float((score(131_000, torch.float32) - near).abs().max()) < 0.1
    assert float((score(131_000, torch.bfloat16) - near).abs().max()) < 0.3


def test_yarn_override_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """transformers reads the scaling from config.json. We read a config.json without it, and the override."""
    scaling = {key: value for key, value in tiny_families.YARN.items() if key != "rope_theta"}
    case = make_case("qwen3-yarn", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path, {"rope_scaling": scaling})
    assert config == case.config and config != read_config(tmp_path)
    ours = dataclasses.replace(case, config=config)
    pages = Pages(config, [table_of(TOKENS)])
    logits_TV = prefill(load_stages(ours, 2), case.ids_T, CUTS["ragged"], pages)
    assert float(row_errors(logits_TV, case.logits_TV).max()) < 1e-4
