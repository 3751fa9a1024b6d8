"""Tests reading a GGUF file that the tests write, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from deltafront.tests.numerics import row_errors
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.gguf.source import GgufSource
from deltafront.workers.model.weights.sources import open_weights

from .conftest import DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB, causal, tiny_config
from .test_stack_weights import Raw, stack_spec


def interleaved(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder a Llama's q or k rows like llama.cpp, which interleaves the two halves of each head."""
    return weight_OI.view(heads, 2, DIM // 2, -1).transpose(1, 2).reshape(weight_OI.shape)


def write_gguf(path: Path, raw: Raw, kinds: dict[str, gguf.GGMLQuantizationType]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(20_000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(DIM)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in raw.items():
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        stored = interleaved(tensor, HEADS if "q_proj" in name else KV_HEADS) if turned else tensor
        kind = kinds.get(name.split(".")[-2], gguf.GGMLQuantizationType.F32)
        data = gguf.quants.quantize(stored.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = {
    "q_proj": gguf.GGMLQuantizationType.Q4_1,
    "k_proj": gguf.GGMLQuantizationType.Q8_0,
    "v_proj": gguf.GGMLQuantizationType.Q4_1,
    "gate_proj": gguf.GGMLQuantizationType.F16,
    "embed_tokens": gguf.GGMLQuantizationType.Q8_0,
}


@pytest.fixture(scope="module")
def gguf_dir(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    write_gguf(directory / "tiny.gguf", load_file(tiny / "model.safetensors"), KINDS)
    config = GgufSource(directory / "tiny.gguf").config()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_gguf_logits_equal_transformers_on_dequantised_weights(gguf_dir: Path) -> None:
    config = read_config(gguf_dir)
    assert config.rope.theta == 20_000.0 and config.rms_eps == 1e-5 and not config.tied_embeddings
    ids_T = torch.randint(0, VOCAB, (40,))
    model = transformers.LlamaForCausalLM(tiny_config(rope_theta=20_000.0, rms_norm_eps=1e-5)).eval()
    theirs = load_gguf_checkpoint(gguf_dir / "tiny.gguf", return_tensors=True, model_to_load=model)
    model.load_state_dict(theirs["tensors"])
    with torch.no_grad():
        wanted_TV = model(ids_T[None]).logits[0]
    stack = load_stack(gguf_dir, stack_spec(gguf_dir))
    hidden_TC = stack.forward(stack.embed(ids_T), torch.arange(40), causal)
    assert float(row_errors(stack.logits(hidden_TC), wanted_TV).max()) < 1e-4


def test_gguf_tensors_equal_the_stored_values(tiny: Path, gguf_dir: Path) -> None:
    raw, source = load_file(tiny / "model.safetensors"), GgufSource(gguf_dir / "tiny.gguf")
    assert source.names() == frozenset(raw)
    for name, tensor in raw.items():
        kind = KINDS.get(name.split(".")[-2])
        bound = {None: 0.0, gguf.GGMLQuantizationType.F16: 1e-3, gguf.GGMLQuantizationType.Q8_0: 0.02}
        error = float(row_errors(source.read(name), tensor).max())
        assert error <= bound.get(kind, 0.12), name
        quantised = kind is not None and kind != gguf.GGMLQuantizationType.F16
        assert (source.read_compact(name).dtype == torch.bfloat16) == quantised


def test_error_names_a_truncated_gguf_file(gguf_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes((gguf_dir / "tiny.gguf").read_bytes()[:100])
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        open_weights(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"GGML is not GGUF" * 4)
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        open_weights(tmp_path)


def test_reads_rope_factors_from_a_gguf_tensor(tmp_path: Path, tiny: Path) -> None:
    """llama.cpp stores llama3 scaling as a tensor with one divisor per frequency."""
    writer = gguf.GGUFWriter(tmp_path / "factors.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 256),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS),
        (writer.add_layer_norm_rms_eps, 1e-6),
    ):
        add(value)
    factors = np.array([1, 1, 1.5, 2, 3, 5, 8, 8], dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text(json.dumps(GgufSource(tmp_path / "factors.gguf").config()))
    config: ModelConfig = read_config(tmp_path)
    assert config.rope.kind == "factors" and config.rope.scaling["factors"] == factors.tolist()
    assert config.tied_embeddings and config.kv_heads == HEADS
