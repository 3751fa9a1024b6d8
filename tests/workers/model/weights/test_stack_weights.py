"""Tests reading a stage's weights: only the shards it needs, adapters, and files that do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deltafront.tests.numerics import assert_rows_close, row_errors
from deltafront.tests.reference.layers import dequantised_product
from deltafront.tests.reference.layers import quantised as quantised_rows
from deltafront.workers.model.decoder.load import load_model, load_stack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights import stack_weights as weights_module
from deltafront.workers.model.weights.projections import Fp8Linear
from deltafront.workers.model.weights.sources import WeightSource, open_weights
from deltafront.workers.model.weights.stack_weights import StackSpec, StackWeights, read_stack
from deltafront.workers.progress import Tell, silent
from deltafront.workers.settings import ModelSpec

from .conftest import DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB, causal

Raw = dict[str, torch.Tensor]


def copy_of(tiny: Path, target: Path, change: dict[str, torch.Tensor | None] | None = None) -> Path:
    """Copy the tiny model with tensors added, replaced or, if None, left out."""
    raw = load_file(tiny / "model.safetensors") | (change or {})
    save_file({name: x for name, x in raw.items() if x is not None}, target / "model.safetensors")
    (target / "config.json").write_bytes((tiny / "config.json").read_bytes())
    return target


def stack_spec(directory: Path, layers: range = range(LAYERS), **more: Any) -> StackSpec:
    ends: dict[str, Any] = {"embedding": True, "head": True} | more
    cpu, config = torch.device("cpu"), read_config(directory)
    return StackSpec(config=config, layers=layers, dtype=torch.float32, device=cpu, **ends)


def read(directory: Path, layers: range = range(LAYERS), tell: Tell = silent, **more: Any) -> StackWeights:
    return read_stack(directory, stack_spec(directory, layers, **more), tell)


def test_fuses_matrices_in_the_right_row_order(tiny: Path) -> None:
    raw, weights = load_file(tiny / "model.safetensors"), read(tiny)
    parts = weights.attentions[2].qkv.weight_OI.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
    for name, part in zip("qkv", parts, strict=True):
        assert torch.equal(part, raw[f"model.layers.2.self_attn.{name}_proj.weight"])
    for name, part in zip(("gate", "up"), weights.mlps[2].gate_up.weight_OI.split(INNER), strict=True):
        assert torch.equal(part, raw[f"model.layers.2.mlp.{name}_proj.weight"])


def test_reads_only_the_shards_of_a_layer_range(tiny: Path, tmp_path: Path) -> None:
    """Shards of other layers need not be on the machine's disk."""
    raw = load_file(tiny / "model.safetensors")
    weight_map = {}
    for name in raw:
        part = name.split(".")[2] if ".layers." in name else "ends"
        weight_map[name] = f"part-{part}.safetensors"
    for file in set(weight_map.values()) - {
        "part-0.safetensors",
        "part-3.safetensors",
        "part-ends.safetensors",
    }:
        save_file({name: raw[name] for name in raw if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    middle = read(tmp_path, range(1, 3), embedding=False, head=False)
    whole = read(tiny)
    for attention, wanted in zip(middle.attentions, whole.attentions[1:3], strict=True):
        assert torch.equal(attention.qkv.weight_OI, wanted.qkv.weight_OI)
    for mlp, wanted_mlp in zip(middle.mlps, whole.mlps[1:3], strict=True):
        assert torch.equal(mlp.down.weight_OI, wanted_mlp.down.weight_OI)
    assert middle.embedding_VC is middle.head is middle.final_norm is None
    with pytest.raises(ModelError, match=r"part-0\.safetensors"):
        read(tmp_path, range(2), embedding=False, head=False)


class Noting:
    """A weight source that counts the reads of each tensor."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.read_names: list[str] = []

    def names(self) -> frozenset[str]:
        return self._source.names()

    def read(self, name: str) -> torch.Tensor:
        self.read_names.append(name)
        return self._source.read(name)


def halved(tiny: Path, cut: int, **more: Any) -> tuple[StackWeights, StackWeights]:
    """Read the weights of two stages. The first ends after the attention half of layer `cut`."""
    first = read(tiny, range(cut + 1), mlps=range(cut), head=False, **more)
    return first, read(tiny, range(cut + 1, LAYERS), mlps=range(cut, LAYERS), embedding=False, **more)


@pytest.mark.parametrize("cut", [0, 1, LAYERS - 2])
@pytest.mark.parametrize("quantisation", [None, "fp8"])
def test_each_stage_of_a_cut_layer_reads_only_its_half(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, quantisation: Any
) -> None:
    sources: list[Noting] = []

    def noting(directory: Path) -> Noting:
        sources.append(Noting(open_weights(directory)))
        return sources[-1]

    adapter = write_adapter(
        tmp_path,
        lora_of(f"layers.{cut}.mlp.up_proj", INNER, HIDDEN)
        | lora_of("layers.2.self_attn.q_proj", 64, HIDDEN),
    )
    more: dict[str, Any] = {"adapter": adapter, "quantisation": quantisation}
    whole, told = read(tiny, **more), list[str]()
    monkeypatch.setattr(weights_module, "open_weights", noting)
    first, last = halved(tiny, cut, tell=told.append, **more)
    names = [name for source in sources for name in source.read_names]
    assert sorted(names) == sorted(load_file(tiny / "model.safetensors")), "all of it, and nothing twice"
    assert told == [
        f"loaded {cut + 1} of {cut + 1} layers",
        f"loaded {LAYERS - cut} of {LAYERS - cut} layers",
    ]
    assert (len(first.attentions), len(first.mlps)) == (cut + 1, cut)
    for found, wanted in zip(first.attentions + last.attentions, whole.attentions, strict=True):
        assert torch.equal(found.qkv.weight_OI, wanted.qkv.weight_OI)
        assert torch.equal(found.output.weight_OI, wanted.output.weight_OI)
    for mlp, wanted_mlp in zip(first.mlps + last.mlps, whole.mlps, strict=True):
        assert torch.equal(mlp.gate_up.weight_OI, wanted_mlp.gate_up.weight_OI)
        assert torch.equal(mlp.down.weight_OI, wanted_mlp.down.weight_OI)


@pytest.mark.parametrize(
    ("unknown", "stages"),
    [("self_attn.q_proj.bias", [0]), ("mlp.up_proj.bias", [1]), ("pre_feedforward_layernorm.weight", [0, 1])],
)
def test_only_the_stage_that_reads_a_layer_refuses_its_unknown_tensor(
    tiny: Path, tmp_path: Path, unknown: str, stages: list[int]
) -> None:
    copy_of(tiny, tmp_path, {f"model.layers.1.{unknown}": torch.zeros(HIDDEN)})
    parts = (range(2), range(1)), (range(2, LAYERS), range(1, LAYERS))
    for stage, (layers, mlps) in enumerate(parts):
        if stage in stages:
            with pytest.raises(ModelError, match=f"no place for tensors .*{unknown}"):
                read(tmp_path, layers, mlps=mlps)
        else:
            read(tmp_path, layers, mlps=mlps)


def test_refuses_an_index_naming_a_tensor_that_its_shard_lacks(tiny: Path, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.up_proj.weight"
    weight_map = dict.fromkeys(load_file(tiny / "model.safetensors"), "model.safetensors")
    copy_of(tiny, tmp_path, {lost: None})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{lost}"):
        read(tmp_path)


def test_tied_embedding_and_head_share_one_tensor(tiny: Path, tmp_path: Path) -> None:
    tied_copy(tiny, tmp_path, {"lm_head.weight": None})
    both, last = read(tmp_path), read(tmp_path, range(3, 4), embedding=False)
    assert both.head.weight_OI is both.embedding_VC
    assert last.embedding_VC is None and torch.equal(last.head.weight_OI, both.head.weight_OI)


def tied_copy(tiny: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    copy_of(tiny, target, change)
    raw = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(raw))
    return target


TIES: dict[str, Callable[[Raw], dict[str, torch.Tensor | None]]] = {
    "equal": lambda raw: {"lm_head.weight": raw["model.embed_tokens.weight"]},
    "another head": lambda raw: {},
    "no head": lambda raw: {"lm_head.weight": None},
    "no embedding": lambda raw: {"model.embed_tokens.weight": None},
}


@pytest.mark.parametrize("tie", TIES)
def test_ties_embedding_and_head_like_transformers(tiny: Path, tmp_path: Path, tie: str) -> None:
    """A head that differs from the embedding is kept. First and last stage read their own tensor."""
    tied_copy(tiny, tmp_path, TIES[tie](load_file(tiny / "model.safetensors")))
    check_weights(tmp_path, read_config(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    both, first, last = read(tmp_path), read(tmp_path, head=False), read(tmp_path, embedding=False)
    assert first.head is last.embedding_VC is None
    assert both.head is not None and last.head is not None
    for table_VC in (both.embedding_VC, first.embedding_VC):
        assert torch.equal(table_VC, theirs.get_input_embeddings().weight)
    for head in (both.head, last.head):
        assert torch.equal(head.weight_OI, theirs.get_output_embeddings().weight)
    assert (both.head.weight_OI is both.embedding_VC) == (tie != "another head")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "mlp.up_proj"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(INNER, HIDDEN + 1)}, r"config\.json says"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(INNER, HIDDEN, dtype=torch.int8)}, "quantised"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(INNER, HIDDEN).to(torch.float8_e4m3fn)},
            "float8_e4m3fn: quantised",
        ),
        ({"model.layers.1.self_attn.q_proj.bias": torch.zeros(HIDDEN)}, "no place"),
        ({"model.layers.4.input_layernorm.weight": torch.ones(HIDDEN)}, "a layer 4, but .* says 4 layers"),
    ],
)
def test_refuses_weights_that_do_not_fit_the_configuration(
    tiny: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(copy_of(tiny, tmp_path, change))


def test_lists_the_files_it_looked_for_if_there_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"looked for model\.safetensors\.index\.json, model\.safetensors"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        open_weights(tmp_path)


# --- adapters


def write_adapter(directory: Path, tensors: Raw, **config: Any) -> Path:
    base = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(base | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def lora_of(module: str, outputs: int, inputs: int, rank: int = 4) -> Raw:
    prefix = f"base_model.model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, inputs),
        f"{prefix}.lora_B.weight": torch.randn(outputs, rank),
    }


def test_quantises_layers_after_merging_the_adapter(tiny: Path, tmp_path: Path) -> None:
    """Every matrix of a layer has one scale per output channel. The head is not quantised."""
    adapter = write_adapter(tmp_path, lora_of("layers.1.self_attn.k_proj", KV_HEADS * DIM, HIDDEN))
    merged, fp8 = read(tiny, adapter=adapter), read(tiny, adapter=adapter, quantisation="fp8")
    halves = [
        *(
            (plain, quantised, ("qkv", "output"))
            for plain, quantised in zip(merged.attentions, fp8.attentions, strict=True)
        ),
        *(
            (plain, quantised, ("gate_up", "down"))
            for plain, quantised in zip(merged.mlps, fp8.mlps, strict=True)
        ),
    ]
    assert len(halves) == 2 * LAYERS
    for plain, quantised, names in halves:
        for name in names:
            found, wanted_OI = getattr(quantised, name), getattr(plain, name).weight_OI
            assert isinstance(found, Fp8Linear)
            values_OI, scale_O1 = quantised_rows(wanted_OI)
            assert_rows_close(found.weight_OI.double(), values_OI * scale_O1, dtype=torch.float16, factor=2.0)
            for tokens in (1, 17):
                x_TI = torch.randn(tokens, wanted_OI.shape[1])
                wanted_TO = dequantised_product(x_TI, wanted_OI)
                assert_rows_close(found(x_TI).double(), wanted_TO, dtype=torch.float16)
    assert fp8.head is not None and merged.head is not None
    assert torch.equal(fp8.head.weight_OI, merged.head.weight_OI)


def test_quantised_logits_stay_close_to_unquantised_ones(tiny: Path) -> None:
    logits = []
    ids_T = torch.randint(0, VOCAB, (40,))
    for kind in (None, "fp8"):
        stack = load_stack(tiny, stack_spec(tiny, quantisation=kind))
        hidden_TC = stack.forward(stack.embed(ids_T), torch.arange(40), causal)
        logits.append(stack.logits(hidden_TC))
    errors_T = row_errors(logits[1], logits[0])
    assert 0.02 < float(errors_T.mean()) < 0.25 and float(errors_T.max()) < 0.5  # another model's errors: 1.4


def test_refuses_quantisation_on_a_cpu(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"^model\.quantisation: fp8 needs a GPU, not cpu$"):
        load_model(ModelSpec(path=str(tiny), quantisation="fp8"), "cpu")


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_adds_its_low_rank_product(tiny: Path, tmp_path: Path, rslora: bool) -> None:
    tensors = lora_of("layers.1.self_attn.k_proj", KV_HEADS * DIM, HIDDEN)
    tensors |= lora_of("layers.1.mlp.down_proj", HIDDEN, INNER)
    adapter = write_adapter(tmp_path, tensors, use_rslora=rslora, init_lora_weights="gaussian")
    plain, merged = read(tiny), read(tiny, adapter=adapter)
    scale = 6 / (math.sqrt(4) if rslora else 4)
    updates = [
        scale
        * tensors[f"base_model.model.model.{module}.lora_B.weight"].double()
        @ tensors[f"base_model.model.model.{module}.lora_A.weight"].double()
        for module in ("layers.1.self_attn.k_proj", "layers.1.mlp.down_proj")
    ]
    rows = slice(HEADS * DIM, (HEADS + KV_HEADS) * DIM)
    wanted_OC = plain.attentions[1].qkv.weight_OI.clone()
    wanted_OC[rows] += updates[0].float()
    assert float(row_errors(merged.attentions[1].qkv.weight_OI, wanted_OC).max()) < 1e-6
    assert (
        float(row_errors(merged.mlps[1].down.weight_OI, plain.mlps[1].down.weight_OI + updates[1]).max())
        < 1e-6
    )
    for layer in (0, 2, 3):
        assert torch.equal(merged.attentions[layer].qkv.weight_OI, plain.attentions[layer].qkv.weight_OI)


@pytest.mark.parametrize(
    ("config", "module", "message"),
    [
        ({"use_dora": True}, "layers.0.mlp.up_proj", "use_dora"),
        ({"fan_in_fan_out": True}, "layers.0.mlp.up_proj", "fan_in_fan_out"),
        ({"bias": "all"}, "layers.0.mlp.up_proj", "bias 'all'"),
        ({"alpha_pattern": {"up_proj": 2}}, "layers.0.mlp.up_proj", "alpha_pattern"),
        ({"peft_type": "IA3"}, "layers.0.mlp.up_proj", "IA3"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layers.0.mlp.up_proj", "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "layers.0.mlp.up_proj", "alora_invocation_tokens"),
        ({"use_qalora": True}, "layers.0.mlp.up_proj", "use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "layers.0.mlp.up_proj", "'pissa_niter_4' is for other"),
        ({"init_lora_weights": "olora"}, "layers.0.mlp.up_proj", "'olora' is for other base weights"),
        ({}, "layers.0.mlp.router", "router"),
        ({}, "embed_tokens", "embed_tokens"),
        ({}, "layers.4.mlp.up_proj", "layers.4"),
    ],
)
def test_refuses_unsupported_adapters(
    tiny: Path, tmp_path: Path, config: dict[str, Any], module: str, message: str
) -> None:
    adapter = write_adapter(tmp_path, lora_of(module, INNER, HIDDEN), **config)
    with pytest.raises(ModelError, match=message):
        read(tiny, adapter=adapter)


def test_refuses_an_adapter_of_another_model_or_an_incomplete_one(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="another model"):
        read(tiny, adapter=write_adapter(tmp_path, lora_of("layers.0.mlp.up_proj", INNER + 1, HIDDEN)))
    half = dict(list(lora_of("layers.0.mlp.up_proj", INNER, HIDDEN).items())[:1])
    with pytest.raises(ModelError, match="only one of"):
        read(tiny, adapter=write_adapter(tmp_path, half))
    with pytest.raises(
        ModelError, match=r"the model has no linear layer model\.layers\.0\.mlp\.gate_up_proj"
    ):
        read(tiny, adapter=write_adapter(tmp_path, lora_of("layers.0.mlp.gate_up_proj", INNER, HIDDEN)))
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read(tiny, adapter=tmp_path / "nowhere")
    (tmp_path / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is a Git LFS pointer"):
        read(tiny, adapter=tmp_path)
