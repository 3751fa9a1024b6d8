"""Tests the comparison of files' headers with config.json. An error names each fault on its own line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deltafront.workers.model import family_registry as registry
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights, read_header
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.sources import open_weights

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 3, 32, 4, 2, 16, 48, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
Raw = dict[str, torch.Tensor]


def save(directory: Path, family: str = "llama", size: str = "1GB", **more: Any) -> Path:
    more = {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS, "pad_token_id": 0, **more}
    if family == "qwen3_moe":
        more |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    if family in ("glm4_moe", "dots1"):
        more |= {"n_shared_experts": 1}
        more |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
    if family == "olmoe":  # its norms of q and k do not know head_dim
        more |= {"head_dim": HIDDEN // HEADS}
    if family in ("cohere2", "afmoe", "cwm", "exaone_moe"):  # they always have windows
        more |= {"sliding_window": 32}
    if family == "granitemoehybrid":
        more |= {"num_local_experts": 0, "shared_intermediate_size": INNER, "position_embedding_type": "rope"}
        more |= {"mamba_n_heads": 1}
    config = transformers.CONFIG_MAPPING[family](**SHAPE | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=size)
    return directory


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path, size="10KB")


def check(directory: Path) -> None:
    check_weights(directory, read_config(directory))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(directory: Path, change: Callable[[Raw], Raw]) -> Path:
    save_file(change(load_file(directory / SINGLE)), directory / SINGLE)
    return directory


FAMILIES = sorted(
    family.model_type
    for family in registry.FAMILIES.values()
    if family.model_type in transformers.CONFIG_MAPPING and family.architecture not in family.wrappers
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tied", "size"), [(False, "10KB"), (True, "1GB")])
def test_accepts_tensors_of_every_family_as_transformers_saves_them(
    tmp_path: Path, family: str, tied: bool, size: str
) -> None:
    save(tmp_path, family, size, tie_word_embeddings=tied)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if size == "1GB" else len(files) > 3
    source = open_weights(tmp_path)
    assert read_config(tmp_path).shapes() == {name: tuple(source.read(name).shape) for name in source.names()}
    check(tmp_path)


PREDICTING = """eh_proj.weight enorm.weight hnorm.weight embed_tokens.weight shared_head.head.weight
    shared_head.norm.weight self_attn.q_proj.weight self_attn.q_proj.weight_scale mlp.experts.0.up_proj.weight
    mlp.gate.e_score_correction_bias""".split()
"""Tensors of a multi-token prediction layer, which predicts the token after next."""


def test_skips_multi_token_prediction_layers(tmp_path: Path) -> None:
    """Published checkpoints have these layers; config.json says how many. transformers does not save them."""
    save(tmp_path, "glm4_moe")
    wanted = {name: read.clone() for name, read in load_file(tmp_path / SINGLE).items()}
    more = {f"model.layers.{LAYERS}.{name}": torch.ones(3) for name in PREDICTING}
    edit(tmp_path, lambda tensors: tensors | more)
    check(tmp_path)
    source = open_weights(tmp_path)
    assert source.names() == wanted.keys()
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in [key for key in raw if key in ("num_mtp_layers", "num_nextn_predict_layers")]:
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    assert f"model.layers.{LAYERS}." in refusal(tmp_path)


@pytest.mark.parametrize(
    ("saved", "said", "says"),
    [
        ("glm4_moe", "qwen3_moe", "partial rotary factor is not supported"),
        ("qwen3_moe", "glm4_moe", r"lack \d+ tensors such as model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("phi3", "llama", r"lack 15 tensors such as model\.layers\.0\.self_attn\.q_proj\.weight"),
        ("llama", "phi3", r"lack 6 tensors such as model\.layers\.0\.self_attn\.qkv_proj\.weight"),
        ("glm", "llama", "partial rotary factor is not supported"),
        ("olmo2", "llama", r"lack 3 tensors such as model\.layers\.0\.input_layernorm\.weight"),
        ("llama", "olmo2", r"lack 9 tensors such as model\.layers\.0\.self_attn\.q_norm\.weight"),
        ("exaone4", "olmo2", r"q_norm\.weight is \(16,\), config\.json says \(64,\)"),
        ("glm4", "glm", r"no place for 6 tensors such as model\.layers\.0\.post_mlp_layernorm\.weight"),
        ("qwen3", "llama", r"no place for 6 tensors such as model\.layers\.0\.self_attn\.k_norm\.weight"),
        ("arcee", "llama", r"lack 3 tensors such as model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("llama", "arcee", r"no place for 3 tensors such as model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("qwen3_moe", "qwen3", r"lack 9 tensors such as model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("qwen3", "qwen3_moe", "has no 'moe_intermediate_size'"),
        ("qwen2", "llama", r"no place for 9 tensors such as model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_refuses_weights_of_another_family_by_a_missing_tensor(
    tmp_path: Path, saved: str, said: str, says: str
) -> None:
    save(tmp_path, saved)
    family = next(family for family in registry.FAMILIES.values() if family.model_type == said)
    raw = json.loads((tmp_path / "config.json").read_text())
    named = {"architectures": [family.architecture], "model_type": said, "hidden_act": family.hidden_act}
    (tmp_path / "config.json").write_text(json.dumps(raw | named))
    assert re.search(says, refusal(tmp_path))


def test_reads_tensor_shapes_from_a_files_header(single: Path) -> None:
    raw, content = load_file(single / SINGLE), (single / SINGLE).read_bytes()
    header = read_header(single / SINGLE)
    assert header.keys() == raw.keys()
    for name, one in header.items():
        values = torch.frombuffer(bytearray(content[one.begin : one.end]), dtype=torch.bfloat16)
        assert one.dtype == "BF16" and torch.equal(values.view(one.shape), raw[name])


def test_ignores_extra_tensors_that_do_not_affect_logits(single: Path) -> None:
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(DIM // 2)}
    check(edit(single, lambda raw: raw | derived | {"v_head.summary.weight": torch.ones(1, HIDDEN)}))


def test_refuses_quantised_weights_without_a_quantization_config(single: Path) -> None:
    scale = {DOWN.removesuffix("weight") + "weight_scale": torch.ones(1)}
    edit(single, lambda raw: raw | {DOWN: raw[DOWN].to(torch.float8_e4m3fn)} | scale)
    assert "hold scales, model.layers.1.mlp.down_proj.weight_scale; config.json does not" in refusal(single)
    edit(single, lambda raw: {name: x for name, x in raw.items() if name not in scale})
    assert f"hold F8_E4M3, {DOWN}; config.json does not say how they are quantised" in refusal(single)
    packed = {DOWN.removesuffix("weight") + "qweight": torch.ones(4, 4, dtype=torch.int32)}
    edit(single, lambda raw: {name: x for name, x in raw.items() if name != DOWN} | packed)
    assert "hold scales, model.layers.1.mlp.down_proj.qweight" in refusal(single)


@pytest.mark.parametrize("prefix", ["language_model.model.", "", "base_model.model.model."])
def test_error_quotes_an_unexpected_prefix_of_tensor_names(single: Path, prefix: str) -> None:
    edit(single, lambda raw: {name.replace("model.", prefix, 1): x for name, x in raw.items()})
    assert f"called {prefix}… where model.… is expected (29 tensors such as" in refusal(single)


def test_error_names_missing_unexpected_and_misshapen_tensors(single: Path) -> None:
    whole = load_file(single / SINGLE)
    lost = {name: x for name, x in whole.items() if name != DOWN}
    assert f"lack {DOWN}, which config.json asks for" in refusal(edit(single, lambda _raw: lost))
    bias = {"lm_head.bias": torch.ones(VOCAB)}
    assert "no place for lm_head.bias" in refusal(edit(single, lambda _raw: whole | bias))
    more = {f"model.layers.3.{name}": torch.ones(1) for name in ("input_layernorm.weight", "mlp.x")}
    assert "a layer 3, but config.json says 3 layers" in refusal(edit(single, lambda _raw: whole | more))
    wide = {DOWN: torch.ones(HIDDEN, INNER + 1)}
    assert f"{DOWN} is (32, 49), config.json says (32, 48)" in refusal(
        edit(single, lambda _raw: whole | wide)
    )


def test_error_names_missing_shards(sharded: Path) -> None:
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    for name in names[1:3]:
        (sharded / name).unlink()
    assert refusal(sharded) == (
        f"{sharded} lacks 2 of its {len(names)} files of weights, such as {names[1]}: download them"
    )


def test_error_names_shards_of_another_checkpoint(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][DOWN] = index["weight_map"]["model.embed_tokens.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"lacks the tensor {DOWN}, which the index says is in it" in refusal(sharded)
    (sharded / INDEX).unlink()
    assert "no weights in" in refusal(sharded) and "other .safetensors files" in refusal(sharded)


@pytest.mark.parametrize("kept", [-1, -1000, 400, 4])
def test_error_names_a_truncated_file(single: Path, kept: int) -> None:
    content = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(content[:kept])
    said = refusal(single)
    if kept < 0:
        assert said.endswith(f"{SINGLE} has {len(content) + kept} bytes of {len(content)}: download it again")
    else:
        assert f"{SINGLE} cannot be read as safetensors" in said


def test_error_names_a_git_lfs_pointer(sharded: Path) -> None:
    path = sorted(sharded.glob("*.safetensors"))[2]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n")
    assert refusal(sharded).startswith(
        f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`"
    )


def test_refuses_an_invalid_gguf_beside_config_json(single: Path) -> None:
    (single / SINGLE).rename(single / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read as GGUF: GGUF magic invalid"):
        check(single)
