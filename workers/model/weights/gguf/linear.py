"""Undoes what llama.cpp's converter does to the tensors of gated delta networks.

In a checkpoint the value heads that use one key head follow one another. llama.cpp's architectures `qwen35`
and `qwen35moe` have them tiled: the first value head of each key head, then the second ones. `qwen3next`
keeps the order, but splits the fused projection in_proj_qkvz, which a checkpoint has by key heads.

Shape suffixes: E channels of the convolution, O output and I input channels, X inputs of a filter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deltafront.workers.model.directory.layer_config import LinearConfig
from deltafront.workers.model.directory.model_config import LINEAR
from deltafront.workers.model.directory.model_files import ModelError

TENSORS: Mapping[str, str] = {
    "attn_qkv": f"{LINEAR}.in_proj_qkv",
    "attn_gate": f"{LINEAR}.in_proj_z",
    "ssm_ba": f"{LINEAR}.in_proj_ba",
    "ssm_beta": f"{LINEAR}.in_proj_b",
    "ssm_alpha": f"{LINEAR}.in_proj_a",
    "ssm_conv1d": f"{LINEAR}.conv1d",
    "ssm_norm": f"{LINEAR}.norm",
    "ssm_out": f"{LINEAR}.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
"""llama.cpp's names of a layer's modules, mapped to ours."""
PARAMETERS: Mapping[str, str] = {"ssm_a": f"{LINEAR}.A_log", "ssm_dt.bias": f"{LINEAR}.dt_bias"}
"""Names of tensors that belong to no module."""
KEYS: Mapping[str, str] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
"""Metadata keys, mapped to keys of config.json."""
READ = ("ssm.inner_size", "rope.dimension_sections", "attention.recurrent_layers")
"""Metadata keys that are read elsewhere. The sections of a rotary embedding are equal for text."""

QKVZ, QKV, Z = (f"{LINEAR}.in_proj_{name}.weight" for name in ("qkvz", "qkv", "z"))


@dataclass(frozen=True)
class LinearTensors:
    """Reads tensors of linear attention in a checkpoint's layout.

    Args:
        read: Reads a tensor by our name, as llama.cpp stores it.
        tiled: True if value heads are tiled.
    """

    read: Callable[[str], torch.Tensor]
    sizes: LinearConfig
    tiled: bool

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor by our name. Raises ModelError if it does not fit the metadata's sizes."""
        try:
            return self._fused(name) if name.endswith(QKVZ) else self._single(name)
        except (RuntimeError, IndexError) as error:
            raise ModelError(f"the tensors of {name} do not fit the metadata ssm.*: {error}") from None

    def _fused(self, name: str) -> torch.Tensor:
        parts = [self.read(name.replace(QKVZ, part)) for part in (QKV, Z)]
        order = torch.tensor(self.sizes.rows_by_kind("in_proj_qkvz"))
        return torch.cat(parts)[order.argsort()]

    def _single(self, name: str) -> torch.Tensor:
        x, of = self.read(name), name.rpartition(f"{LINEAR}.")[2]
        if of == "A_log":
            x = (-x).log()
        if self.tiled:
            x = self._grouped(x, of)
        return x[:, None] if of == "conv1d.weight" else x

    def _grouped(self, x: torch.Tensor, of: str) -> torch.Tensor:
        if of in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = 2 * self.sizes.key_heads * self.sizes.key_dim
            return torch.cat([x[:keys], self._order(x[keys:], 0)])
        if of == "out_proj.weight":
            return self._order(x, 1)
        return x if of == "norm.weight" else self._order(x, 0)

    def _order(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        keys, values = self.sizes.key_heads, self.sizes.value_heads
        tiles = values // keys, keys, x.shape[dim] // values
        by_tiles = x.reshape(*x.shape[:dim], *tiles, *x.shape[dim + 1 :])
        return by_tiles.transpose(dim, dim + 1).reshape(x.shape)


def linear_keys(field: Callable[..., Any]) -> dict[str, Any]:
    """Return keys of config.json that metadata have in another form.

    Args:
        field: Returns a metadata key's value, or the given default.

    Raises:
        ModelError: Values contradict one another.
    """
    inner, heads = int(field("ssm.inner_size")), int(field("ssm.time_step_rank"))
    if heads < 1 or inner % heads:
        raise ModelError(f"GGUF metadata: ssm.inner_size = {inner} is no multiple of {heads} heads")
    found: dict[str, Any] = {"linear_value_head_dim": inner // heads}
    if recurrent := field("attention.recurrent_layers", ()):
        if not isinstance(recurrent, list):
            raise ModelError(f"GGUF metadata: attention.recurrent_layers = {recurrent!r} is no list")
        found["layer_types"] = ["linear_attention" if one else "full_attention" for one in recurrent]
    return found
