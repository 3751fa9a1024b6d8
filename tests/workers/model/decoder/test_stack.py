"""Tests our decoder against transformers in fp32: every family, whole, in stages and in chunks.

Our decoder and transformers' share only the tokenizer's code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deltafront.benchmarks.engine.model import TINY
from deltafront.service.cli import size
from deltafront.service.config import parse
from deltafront.service.wiring import local_model
from deltafront.tests.numerics import row_errors
from deltafront.tests.workers.in_ranks import parts
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.layer_config import LinearConfig
from deltafront.workers.model.directory.model_config import SHARED, ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import DEFAULT_MODEL, embedded_gguf, model_directory
from deltafront.workers.model.directory.text_part import own_names
from deltafront.workers.model.family_registry import FAMILIES as SERVED
from deltafront.workers.model.family_registry import gguf_families
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack
from deltafront.workers.settings import ModelSpec, Quantisation

from .cases import (
    ASKED,
    CUTS,
    TOKENS,
    Case,
    Pages,
    expected_logits,
    likeliest,
    load_shares,
    load_stages,
    make_case,
    prefill,
    table_of,
)
from .gguf_files import GGUF, write_gguf
from .tiny_families import FAMILIES, FP8_FILES, SHAPE

LIMIT = 1e-4


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("stages", "cuts"), [(1, "whole"), (1, "ragged"), (2, "chunks"), (3, "ragged")])
def test_logits_equal_transformers(case: Case, stages: int, cuts: str) -> None:
    pages = Pages(case.config, [table_of(TOKENS)])
    logits_TV = prefill(load_stages(case, stages), case.ids_T, CUTS[cuts], pages)
    assert logits_TV.dtype == torch.float32
    assert float(row_errors(logits_TV, case.logits_TV).max()) < LIMIT


def cut_at(halves: Sequence[int]) -> list[LayerShare]:
    """Divide the layers' halves A0 M0 A1 M1 … (attention and MLP) into shares that end at these indices."""
    bounds = itertools.pairwise([0, *halves, 2 * SHAPE["num_hidden_layers"]])
    return [LayerShare(range((a + 1) // 2, (b + 1) // 2), range(a // 2, b // 2)) for a, b in bounds]


# Cuts between and inside layers, one to five at a time.
EVERY_LAYER = (1, 3, 5, 7, 9)
HALVES = {
    torch.float32: [(3, 8), EVERY_LAYER],
    torch.bfloat16: [(1, 4, 9), (2, 3, 5, 8)],
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_cutting_stages_inside_a_layer_does_not_change_a_bit(case: Case, dtype: torch.dtype) -> None:
    """All bits are the same, because stages pass on the sum that the fused norm computes."""

    attention = list(case.config.attention_layers(range(6)))

    def read(stacks: list[LayerStack]) -> list[torch.Tensor]:
        pages = Pages(case.config, [table_of(TOKENS)], dtype)
        logits_TV = prefill(stacks, case.ids_T, CUTS["ragged"], pages)
        states = [tensor for layer in pages.states.values() for tensor in vars(layer).values()]
        return [logits_TV, *(side[attention] for side in pages.cache.sides), *states]

    whole = read(load_stages(case, 1, dtype))
    for halves in HALVES[dtype]:
        between = dict.fromkeys(half + half % 2 for half in halves)  # cuts between layers only
        cut = load_shares(case, cut_at([*between] if case.config.parallel else halves), dtype)
        assert sum(len(stack.layers) for stack in cut) == sum(len(stack.mlps) for stack in cut) == 6
        for found, wanted in zip(read(cut), whole, strict=True):
            assert torch.equal(found, wanted), halves


@pytest.mark.parametrize(
    ("layers", "mlps"),
    [
        (range(2, 4), range(4)),
        (range(2, 4), range(2, 5)),
        (range(2, 4), range(3, 4)),
        (range(2, 4), range(2, 2)),
        (range(2), range(-1, 2)),
        (range(2, 2), range(1, 2)),
    ],
)
def test_refuses_stages_whose_mlps_do_not_follow_their_attention(layers: range, mlps: range) -> None:
    weights: Any = None
    with pytest.raises(ModelError, match="layers range"):
        LayerStack(
            StackSpec(
                config=TINY,
                layers=layers,
                mlps=mlps,
                embedding=True,
                head=True,
                dtype=torch.float32,
                device=torch.device("cpu"),
            ),
            weights,
        )


def test_batched_decode_steps_equal_prefill(case: Case) -> None:
    """Two sequences of different lengths decode in one batch. Logits are compared with those of prefill."""
    stack = load_stages(case, 1)
    numbers = list(range(2 * (pages_for(TOKENS) + 3)))
    pages = Pages(case.config, [numbers[::2], numbers[1::2]])
    lengths = [140, 53]
    for sequence, length in enumerate(lengths):
        prefill(stack, case.ids_T[:length], (length,), pages, sequence)
    for step in range(6):
        positions = [length + step for length in lengths]
        hidden_TC = stack[0].embed(case.ids_T[positions])
        attend = pages.step(positions, stack[0].sinks)
        given = hidden_TC, torch.tensor(positions), attend
        hidden_TC = stack[0].forward(*given, row_states=pages.step_states())
        errors = row_errors(stack[0].logits(hidden_TC), case.logits_TV[positions])
        assert float(errors.max()) < LIMIT


def test_greedy_tokens_equal_transformers(case: Case) -> None:
    """The tokens are decoded one by one through two stages."""
    found, asked_T = answered(case), case.ids_T[: sum(ASKED)]
    assert found == likeliest(case.theirs or case.directory, asked_T, found)


@functools.lru_cache(maxsize=2)
def answered(case: Case, tokens: int = 64) -> list[int]:
    end, stages = sum(ASKED), load_stages(case, 2)
    pages, found = Pages(case.config, [table_of(end + tokens)]), list[int]()
    logits_TV = prefill(stages, case.ids_T[:end], ASKED, pages)
    for position in range(end, end + tokens):
        found.append(int(logits_TV[-1].argmax()))
        hidden_TC = stages[0].embed(torch.tensor(found[-1:]))
        for stage in stages:
            attend = pages.step([position], stage.sinks)
            given = hidden_TC, torch.tensor([position]), attend
            hidden_TC = stage.forward(*given, row_states=pages.step_states())
        logits_TV = stages[-1].logits(hidden_TC)
    return found


def widths(config: ModelConfig, name: str) -> list[int]:
    """Return the widths of the matrices that are fused into a tensor of `MixtureWeights` or `MlpWeights`."""
    shared = [
        width for module, width in config.mlp_modules.items() if (module == SHARED) == ("shared" in name)
    ]
    return [width for width in shared for _ in range(2 if config.is_gated else 1)]


def test_each_rank_loads_its_heads_and_columns(case: Case) -> None:
    """Each part of a fused tensor is divided among ranks separately."""
    spec = StackSpec(
        config=case.config,
        layers=range(6),
        embedding=True,
        head=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    whole = read_stack(case.directory, spec)
    counts = (case.config.q_heads, case.config.kv_heads, case.config.kv_heads)
    heads = [count * case.config.head_dim for count in counts]
    for rank in range(2):
        part = read_stack(case.directory, replace(spec, rank=rank, ranks=2))
        for layer in range(6):
            if (linear := case.config.of_layer(layer).of_linear_layers) is not None:
                check_linear(part.attentions[layer], whole.attentions[layer], linear, rank)
                continue
            mine, theirs = part.attentions[layer].qkv.weight_OI, whole.attentions[layer].qkv.weight_OI
            assert torch.equal(mine, torch.cat([x.chunk(2)[rank] for x in theirs.split(heads)]))
            for name in ("gate_up", "shared_gate_up"):
                if (theirs := getattr(whole.mlps[layer], name, None)) is not None:
                    rows = theirs.weight_OI.split(widths(case.config.of_layer(layer), name))
                    mine = getattr(part.mlps[layer], name).weight_OI
                    assert torch.equal(mine, torch.cat([x.chunk(2)[rank] for x in rows]))
            for name in ("down", "shared_down"):
                if (theirs := getattr(whole.mlps[layer], name, None)) is not None:
                    mine = getattr(part.mlps[layer], name).weight_OI
                    assert torch.equal(mine, theirs.weight_OI.chunk(2, dim=1)[rank])


def check_linear(mine: Any, theirs: Any, linear: LinearConfig, rank: int) -> None:
    """Check one rank's weights of linear attention against the whole layer's."""
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    for name, rows in (("qkvz", (keys, keys, values, values)), ("conv_EX", (keys, keys, values))):
        found, whole = (one.qkvz.weight_OI if name == "qkvz" else one.delta.conv_EX for one in (mine, theirs))
        assert torch.equal(found, torch.cat([x.chunk(2)[rank] for x in whole.split(rows)])), name
    heads = [x.chunk(2)[rank] for x in theirs.ba_JC.split(linear.value_heads)]
    assert torch.equal(mine.ba_JC, torch.cat(heads))
    assert torch.equal(mine.delta.decay_H, theirs.delta.decay_H.chunk(2)[rank])
    assert torch.equal(mine.delta.bias_H, theirs.delta.bias_H.chunk(2)[rank])
    assert torch.equal(mine.delta.norm_D, theirs.delta.norm_D)
    assert torch.equal(mine.output.weight_OI, theirs.output.weight_OI.chunk(2, dim=1)[rank])
    assert mine.delta.key_heads * 2 == theirs.delta.key_heads


def test_logits_of_two_ranks_equal_transformers(case: Case) -> None:
    def computed(stack: LayerStack) -> torch.Tensor:
        return prefill([stack], case.ids_T, CUTS["ragged"], Pages(stack.config, [table_of(TOKENS)]))

    stacks = parts(case.directory, 2)
    with ThreadPoolExecutor(len(stacks)) as threads:
        for logits_TV in threads.map(computed, stacks):
            assert float(row_errors(logits_TV, case.logits_TV).max()) < LIMIT


def test_gguf_file_gives_the_same_logits_as_safetensors(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has metadata and vocabulary like llama.cpp's converter's, and is loaded like in `serve`."""
    kind = request.node.callspec.params["case"]
    if kind not in GGUF:
        pytest.skip("of this family another case has a GGUF")
    raw = json.loads(((case.theirs or case.directory) / "config.json").read_text())
    tensors = load_file(case.directory / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", raw, tensors, *GGUF[kind])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = {"model": {"path": str(tmp_path / "model.gguf")}, "decode": {"page_selection": "full"}}
    directory = Path(local_model(parse(content)).model.path)
    found = Case(directory, read_config(directory), case.ids_T, case.logits_TV)
    pages = Pages(found.config, [table_of(TOKENS)])
    logits_TV = prefill(load_stages(found, 2), case.ids_T, CUTS["chunks"], pages)
    assert float(row_errors(logits_TV, case.logits_TV).max()) < LIMIT
    assert answered(found) == answered(case)


def test_fp8_checkpoint_gives_the_logits_of_its_dequantised_weights(case: Case, tmp_path: Path) -> None:
    """The test runs for every family, because tensor names and fused matrices differ."""
    raw = json.loads((case.directory / "config.json").read_text())
    plain = load_file(case.directory / "model.safetensors")
    stored = dict(plain)
    for own, name in own_names(plain, raw).items():
        if own.endswith("_proj.weight"):
            scales_O1 = plain[name].abs().amax(1, keepdim=True) / 448
            stored[name] = (plain[name] / scales_O1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"], plain[name] = scales_O1, stored[name].float() * scales_O1
    logits = []
    for kind, tensors in (("plain", plain), ("fp8", stored)):
        (directory := tmp_path / kind).mkdir()
        said = {"quantization_config": FP8_FILES} if kind == "fp8" else {}
        (directory / "config.json").write_text(json.dumps(raw | said))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = read_config(directory)
        check_weights(directory, config)
        stages = load_stages(replace(case, directory=directory, config=config), 2)
        logits.append(prefill(stages, case.ids_T, CUTS["chunks"], Pages(config, [table_of(TOKENS)])))
    assert torch.equal(*logits)


def test_every_family_with_gguf_files_is_tested() -> None:
    written = {gguf.MODEL_ARCH_NAMES[architecture] for architecture, *_how in GGUF.values()}
    assert written == gguf_families().keys()


OUTSIDE = """
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import register
register(Family(
    name="Mine", architecture="MineForCausalLM", model_type="mine", keys={"depth": "num_hidden_layers"},
    layers="blocks.", tensors={"up": "mlp.up_proj", "table": "model.embed_tokens"}, fixed={"qk_norm": True},
    implied={"head_dim": 32},
))
"""


@mock.patch.dict(SERVED)
def test_loads_a_model_family_from_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family is Qwen3 under other names. A worker only gets the module's name."""
    config = FAMILIES["qwen3"]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    (mine := tmp_path / "mine").mkdir()
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    raw |= {"architectures": ["MineForCausalLM"], "model_type": "mine", "depth": raw.pop("num_hidden_layers")}
    names = {"model.layers.": "blocks.", "mlp.up_proj": "up", "model.embed_tokens": "table"}
    stored = {}
    for name, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items():
        stored[functools.reduce(lambda name, pair: name.replace(*pair), names.items(), name)] = tensor
    save_file(stored, mine / "model.safetensors", metadata={"format": "pt"})
    (mine / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "head_dim"}))
    (mine / "tokenizer.json").write_text("{}")
    (tmp_path / "family_from_outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec(path=str(mine), dtype="float32", family_modules=("family_from_outside",))
    stages = [load_model(spec, "cpu", stage, 2) for stage in range(2)]
    ids_T = torch.randint(0, SHAPE["vocab_size"], (TOKENS,))
    logits_TV = prefill(stages, ids_T, CUTS["chunks"], Pages(stages[0].config, [table_of(TOKENS)]))
    assert float(row_errors(logits_TV, expected_logits(tmp_path / "theirs", ids_T)).max()) < LIMIT


def test_every_model_family_is_tested() -> None:
    made = {*(config().get_text_config().model_type for config in FAMILIES.values()), "exaone"}
    assert {family.model_type for family in SERVED.values()} <= made


def held(weights: Any) -> dict[int, torch.Tensor]:
    """Return each tensor by its address, so that shared tensors count once."""
    if isinstance(weights, torch.Tensor):
        return {weights.data_ptr(): weights}
    if not (isinstance(weights, tuple) or dataclasses.is_dataclass(weights)):
        return {}
    parts = weights if isinstance(weights, tuple) else vars(weights).values()
    return {key: tensor for part in parts for key, tensor in held(part).items()}


@pytest.mark.parametrize("stages", [1, 2, 6])
def test_config_counts_the_weights_and_kv_of_the_loaded_tensors(case: Case, stages: int) -> None:
    config = case.config
    for stage, stack in enumerate(load_stages(case, stages)):
        ends = {"embedding": stage == 0, "head": stage == stages - 1}
        numbers = sum(tensor.numel() for tensor in held(stack._weights).values())
        assert numbers == config.weights(stack.layers, stack.mlps, **ends)
        cache = PagedKVCache(stack.layers, config.kv_heads, config.head_dim, 3, torch.float16, "cpu")
        assert 2 * cache.k_LPSGD.nbytes == 3 * PAGE_TOKENS * config.kv_values(len(stack.layers)) * 2


@pytest.mark.parametrize("kind", [None, *get_args(Quantisation)])
def test_size_counts_the_bytes_of_the_loaded_tensors(case: Case, kind: Quantisation | None) -> None:
    config, how = case.config, {"dtype": torch.bfloat16, "device": torch.device("cpu"), "quantisation": kind}

    def loaded(layers: range, mlps: range, ranks: int = 1) -> int:
        ends = {"embedding": True, "head": True}
        spec = StackSpec(config=config, layers=layers, mlps=mlps, ranks=ranks, **ends, **how)
        weights = read_stack(case.directory, spec)
        weights = replace(weights, head=None) if config.tied_embeddings else weights
        return sum(tensor.nbytes for tensor in held(weights).values())

    for layers, mlps in ((range(6), range(6)), (range(1, 4), range(3)), (range(3, 6), range(3, 6))):
        assert size.weight_bytes(config, layers, "bfloat16", kind, mlps=mlps) == loaded(layers, mlps)
    for ranks in size.rank_counts(config):
        found = size.rank_bytes(config, ranks, 0, "bfloat16", kind)
        states = config.of_rank(ranks).state_bytes(range(6), 2)
        assert found - states == loaded(range(6), range(6), ranks)


def assert_bf16_is_no_worse_than_transformers(logits_TV: torch.Tensor, case: Case) -> None:
    """Assert that the error of our bf16 logits relative to fp32 is no larger than that of transformers, in
    the mean and in the worst row.

    For a mixture, compare the median row: where two experts are nearly equal, rounding in either program
    chooses another one than fp32 does. A few such rows decide mean and maximum, and rows that attend to
    them are a little off.
    """
    theirs_TV = expected_logits(case.theirs or case.directory, case.ids_T, torch.bfloat16)
    ours_T, theirs_T = (row_errors(x.cpu(), case.logits_TV) for x in (logits_TV, theirs_TV))
    if case.config.mixture is not None:
        assert float(ours_T.median()) < 1.5 * float(theirs_T.median())
        return
    assert float(ours_T.mean()) < 1.2 * float(theirs_T.mean())
    assert float(ours_T.max()) < 1.5 * float(theirs_T.max())


def test_bf16_is_no_worse_than_transformers(case: Case) -> None:
    pages = Pages(case.config, [table_of(TOKENS)], torch.bfloat16)
    logits_TV = prefill(load_stages(case, 2, torch.bfloat16), case.ids_T, CUTS["chunks"], pages)
    assert_bf16_is_no_worse_than_transformers(logits_TV, case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_logits_equal_transformers_on_the_cpu(case: Case, dtype: torch.dtype) -> None:
    pages = Pages(case.config, [table_of(TOKENS)], dtype, "cuda")
    logits_TV = prefill(load_stages(case, 2, dtype, "cuda"), case.ids_T, CUTS["chunks"], pages)
    assert logits_TV.is_cuda
    if dtype == torch.float32:
        assert float(row_errors(logits_TV.cpu(), case.logits_TV).max()) < LIMIT
    else:
        assert_bf16_is_no_worse_than_transformers(logits_TV, case)


def test_forward_calls_attention_for_each_layer_with_its_heads(case: Case) -> None:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((layer, q.shape[1:], k.shape[1:]))
        return torch.zeros_like(q)

    seen: list[Any] = []
    (stack,) = load_stages(case, 1)
    stack.forward(stack.embed(case.ids_T[:4]), torch.arange(4), attend)
    shape = (case.config.q_heads, case.config.head_dim), (case.config.kv_heads, case.config.head_dim)
    assert seen == [(layer, *shape) for layer in case.config.attention_layers(range(6))]


def test_a_stage_without_embedding_or_head_refuses_to_use_them(case: Case) -> None:
    first, last = load_stages(case, 2)
    assert first.embed(case.ids_T).shape == (len(case.ids_T), case.config.hidden)
    assert (first.has_head, last.has_head) == (False, True)
    with pytest.raises(ModelError, match="no LM head"):
        first.logits(torch.zeros(1, case.config.hidden))
    with pytest.raises(ModelError, match="no embedding"):
        last.embed(case.ids_T)


@pytest.fixture(scope="module")
def smollm2() -> Case:
    try:
        embedded_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    directory = model_directory(DEFAULT_MODEL)
    ids_T = torch.randint(3, 49152, (96,), generator=torch.Generator().manual_seed(2))
    return Case(directory, read_config(directory), ids_T, expected_logits(directory, ids_T))


@pytest.mark.parametrize(("stages", "cuts"), [(1, (96,)), (3, (32, 50, 14))])
def test_smollm2_logits_equal_transformers(smollm2: Case, stages: int, cuts: tuple[int, ...]) -> None:
    stack = load_stages(smollm2, stages)
    logits_TV = prefill(stack, smollm2.ids_T, cuts, Pages(smollm2.config, [table_of(96)]))
    assert float(row_errors(logits_TV, smollm2.logits_TV).max()) < LIMIT
