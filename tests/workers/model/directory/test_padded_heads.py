"""Tests padding heads to a size that GPU kernels take."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_model_config import LLAMA31, read


def test_heads_are_padded_unless_they_have_norms(tmp_path: Path) -> None:
    """Scores keep the scale of the model's own channels, and the counted weights include the padding."""
    for own, padded in ((48, 48), (64, 64), (80, 128), (96, 128), (112, 128), (160, 256), (288, 288)):
        config = read(tmp_path, LLAMA31 | {"head_dim": own})
        assert (config.head_dim, config.head_dim - config.head_padding) == (padded, own)
        assert config.attention_scale * padded**-0.5 == pytest.approx(own**-0.5)
        assert config.shapes()["model.layers.0.self_attn.o_proj.weight"] == (4096, 32 * own)
        assert config.shapes()["model.layers.0.self_attn.k_proj.weight"] == (8 * own, 4096)
        added = config.weights(range(32)) - config.as_stored.weights(range(32))
        assert added == 32 * 4096 * (2 * 32 + 2 * 8) * (padded - own)
    normed = LLAMA31 | {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": None, "head_dim": 80}
    assert read(tmp_path, normed).head_dim == 80
