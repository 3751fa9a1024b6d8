"""Tests linear attention in `LayerStack`: chunks, states at cuts, and the weights of hybrid models.

`test_stack` compares all families with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.kernels.gated_delta.states import LayerStates, RowStates, SequenceStates
from deltafront.kernels.layers.rope import KVRows
from deltafront.tests.numerics import row_errors
from deltafront.tests.workers.tiny_hybrid import LAYERS, LINEAR_LAYERS, make_tiny_hybrid
from deltafront.workers.model.decoder import load as load_module
from deltafront.workers.model.decoder.load import load_model, load_stack
from deltafront.workers.model.decoder.stack import AttentionCalls, LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.model.weights.layer_weights import AttentionWeights, GatedDeltaWeights
from deltafront.workers.model.weights.projections import Fp8Linear
from deltafront.workers.model.weights.stack_weights import StackSpec
from deltafront.workers.settings import ModelSpec

from .cases import Case, Pages, expected_logits, load_shares, make_case, prefill, table_of

TOKENS, LIMIT = 150, 1e-4
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = make_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))
    config, ids_T = read_config(directory), torch.randint(0, 199, (TOKENS,))
    return Case(directory, config, ids_T, expected_logits(directory, ids_T))


@pytest.fixture(scope="module")
def stack(tiny: Case) -> LayerStack:
    return load(tiny.directory)


def load(directory: Path, **more: Any) -> LayerStack:
    config = read_config(directory)
    spec = StackSpec(
        config=config,
        layers=range(config.layers),
        embedding=True,
        head=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return load_stack(directory, replace(spec, **more))


def test_the_tiny_hybrid_has_both_kinds_of_attention(tiny: Case) -> None:
    assert tiny.config.linear_layers == LINEAR_LAYERS
    assert tiny.config.attention_layers(range(LAYERS)) == (3, 7)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 31, 63, 64, 65, 149, 150])
def test_chunks_of_every_remainder_equal_transformers(tiny: Case, stack: LayerStack, chunk: int) -> None:
    cuts = (*[chunk] * (TOKENS // chunk), *filter(None, [TOKENS % chunk]))
    logits_TV = prefill([stack], tiny.ids_T, cuts, Pages(tiny.config, [table_of(TOKENS)]))
    assert float(row_errors(logits_TV, tiny.logits_TV).max()) < LIMIT


@pytest.mark.parametrize("half", range(1, 2 * LAYERS - 1))
def test_two_stages_may_be_cut_at_every_half_of_a_layer(tiny: Case, half: int) -> None:
    shares = [
        LayerShare(range((a + 1) // 2, (b + 1) // 2), range(a // 2, b // 2))
        for a, b in ((0, half), (half, 2 * LAYERS))
    ]
    pages = Pages(tiny.config, [table_of(TOKENS)])
    logits_TV = prefill(load_shares(tiny, shares), tiny.ids_T, (100, 50), pages)
    assert float(row_errors(logits_TV, tiny.logits_TV).max()) < LIMIT


def slot_states(pages: Pages, slots: int) -> dict[int, LayerStates]:
    """Return states with a zeroed slot 0 and unwritten others."""
    made = {}
    for layer, states in pages.states.items():
        both = []
        for state in vars(states).values():
            whole = torch.full((slots, *state.shape[1:]), float("nan"))
            whole[0] = 0.0
            both.append(whole)
        made[layer] = LayerStates(*both)
    return made


def test_a_sequence_goes_on_from_the_state_at_any_cut(tiny: Case, stack: LayerStack) -> None:
    """One call writes the states after 2, 64 and 101 rows. Later rows from each are those of the prompt."""
    ends, pages = (2, 64, 101, 120), Pages(tiny.config, [table_of(TOKENS)])
    states = slot_states(pages, 5)
    cuts = tuple((end, slot) for slot, end in enumerate(ends, start=1))

    def run(start: int, end: int, rows: Callable[[int], RowStates]) -> torch.Tensor:
        hidden_TC, positions_T = stack.embed(tiny.ids_T[start:end]), torch.arange(start, end)
        attend = pages.chunk(0, start)
        return stack.logits(stack.forward(hidden_TC, positions_T, attend, row_states=rows))

    first_TV = run(0, ends[-1], lambda layer: SequenceStates(states[layer], 0, cuts))
    assert float(row_errors(first_TV, tiny.logits_TV[: ends[-1]]).max()) < LIMIT
    for slot, end in enumerate(ends, start=1):
        rest = ((TOKENS - end, 0),)
        found_TV = run(end, TOKENS, lambda layer, s=slot, r=rest: SequenceStates(states[layer], s, r))  # type: ignore[misc]
        assert float(row_errors(found_TV, tiny.logits_TV[end:]).max()) < LIMIT, end


def last_rows(stack: LayerStack, rows: int | None) -> tuple[AttentionCalls, list[int]]:
    """Return calls whose last layer with attention returns `rows` rows of zeros, and the layers they saw."""
    seen: list[int] = []

    def kv_rows(layer: int) -> KVRows:
        k_TGD, v_TGD = torch.empty(20, 2, 64), torch.empty(20, 2, 64)
        return KVRows(k_TGD, v_TGD, torch.arange(20))

    def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        seen.append(layer)
        is_last = layer == stack.config.attention_layers(range(stack.config.layers))[-1]
        return torch.zeros_like(q_THD[-rows:]) if rows else None if is_last else torch.zeros_like(q_THD)

    def row_states(layer: int) -> RowStates:
        seen.append(layer)
        return SequenceStates(stack.fresh_states(1), 0, ((20, 0),))

    return AttentionCalls(kv_rows, attend, row_states), seen


def test_the_last_layer_may_return_no_row(tiny: Case, stack: LayerStack) -> None:
    calls, seen = last_rows(stack, None)
    hidden_TC = stack.run(stack.embed(tiny.ids_T[:20]), torch.arange(20), calls)
    assert seen == list(range(LAYERS)) and len(hidden_TC) == 20


def test_only_needed_rows_pass_a_last_layer_with_attention(tiny: Case, stack: LayerStack) -> None:
    calls, _seen = last_rows(stack, 3)
    hidden_TC = stack.run(stack.embed(tiny.ids_T[:20]), torch.arange(20), calls, layers=range(7, 8))
    assert len(hidden_TC) == 3


def test_refuses_callers_without_states(tiny: Case, stack: LayerStack) -> None:
    calls = replace(last_rows(stack, None)[0], row_states=AttentionCalls.row_states)
    with pytest.raises(ModelError, match="layer 0 has linear attention"):
        stack.run(stack.embed(tiny.ids_T[:20]), torch.arange(20), calls)


def test_layers_of_both_kinds_have_an_output_matrix_and_no_sinks(stack: LayerStack) -> None:
    assert all(stack.sinks(layer) is None for layer in range(LAYERS))
    widths = [stack.layer(layer).output_weight_CO.shape[1] for layer in range(LAYERS)]
    assert widths == [4 * 32 if layer in LINEAR_LAYERS else 4 * 64 for layer in range(LAYERS)]
    assert not stack.quantised
    stack.compile_gemms()


def test_states_are_refused_where_no_layer_needs_them(tmp_path: Path) -> None:
    directory = make_tiny_hybrid(tmp_path, 4)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"layer_types": ["full_attention"] * 4}))
    with pytest.raises(ModelError, match=r"the weights have no tensor .*self_attn"):
        load(directory)


def test_fp8_leaves_the_gates_of_linear_attention_alone(tiny: Case, stack: LayerStack) -> None:
    quantised = load(tiny.directory, quantisation="fp8")
    assert quantised.quantised
    for layer in range(LAYERS):
        weights, plain = quantised.layer(layer).attention, stack.layer(layer).attention
        if isinstance(weights, GatedDeltaWeights):
            assert isinstance(weights.qkvz, Fp8Linear) and isinstance(weights.output, Fp8Linear)
            assert isinstance(plain, GatedDeltaWeights) and torch.equal(weights.ba_JC, plain.ba_JC)
        else:
            assert isinstance(weights, AttentionWeights) and isinstance(weights.gate, Fp8Linear)


def test_names_the_package_that_a_gpu_needs(tiny: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install flash-linear-attention"):
        load_model(ModelSpec(path=str(tiny.directory)), "cuda")
    load_model(ModelSpec(path=str(tiny.directory)), "cpu")


# --- checkpoints


def copy_of(directory: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Copy a model with tensors that `change` adds, replaces or deletes."""
    target.mkdir()
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, target / SINGLE, metadata={"format": "pt"})
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target


LAYER = "model.layers.1.linear_attn."


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("in_proj_z.bias", torch.zeros(128), "no place for .*in_proj_z.bias"),
        ("conv1d.bias", torch.zeros(192), "no place for .*conv1d.bias"),
        ("A_log", torch.zeros(5), "linear_attn.A_log.* is"),
        ("conv1d.weight", torch.zeros(192, 4), "linear_attn.conv1d.weight.* is"),
        ("in_proj_a.weight", None, "in_proj_a.weight"),
    ],
)
def test_refuses_tensors_that_do_not_fit(
    tiny: Case, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(LAYER + name, None)
        tensors.update({} if tensor is None else {LAYER + name: tensor})

    copy = copy_of(tiny.directory, tmp_path / "copy", change)
    with pytest.raises(ModelError, match=message):
        check_weights(copy, tiny.config)
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_reads_no_tensors_of_images_or_of_further_tokens(tiny: Case, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(dict.fromkeys(("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"), torch.ones(1)))
        tensors["model.visual.merger.norm.weight"] = torch.zeros(2)

    def own(tensors: dict[str, torch.Tensor]) -> None:
        change(tensors)
        for name, tensor in list(tensors.items()):
            tensors[name] = tensor.clone()

    copy = copy_of(tiny.directory, tmp_path / "copy", own)
    check_weights(copy, tiny.config)
    load(copy)


@pytest.mark.parametrize("family", ["qwen3.5-moe", "qwen3-next-mixed"])
def test_experts_stored_in_one_tensor_are_the_same(tmp_path: Path, family: str) -> None:
    """Makers' checkpoints stack them, gate's rows before up's. transformers saves each by itself."""
    case = make_case(family, tmp_path / "apart")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        modules = {name.partition("experts.")[0] for name in tensors if ".experts." in name}
        for module in modules:
            gate, up, down = (
                torch.stack([tensors.pop(f"{module}experts.{e}.{name}_proj.weight") for e in range(8)])
                for name in ("gate", "up", "down")
            )
            tensors[f"{module}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{module}experts.down_proj"] = down

    copy = copy_of(case.directory, tmp_path / "stacked", change)
    check_weights(copy, case.config)
    apart, stacked = load(case.directory), load(copy)
    pages = [Pages(case.config, [table_of(TOKENS)]) for _ in "12"]
    logits = [
        prefill([one], case.ids_T, (150,), own) for one, own in zip((apart, stacked), pages, strict=True)
    ]
    assert torch.equal(*logits)


def test_an_adapter_of_q_proj_changes_queries_and_gates(tiny: Case, tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.q_proj"
    a_RI, b_OR = torch.randn(4, 64), torch.randn(512, 4)

    def merge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight"] += b_OR @ a_RI * 2.0

    merged = copy_of(tiny.directory, tmp_path / "merged", merge)
    prefix = f"base_model.model.{name}"
    save_file(
        {f"{prefix}.lora_A.weight": a_RI, f"{prefix}.lora_B.weight": b_OR},
        tmp_path / "adapter_model.safetensors",
    )
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    found = load(tiny.directory, adapter=tmp_path)
    logits = [
        prefill([one], tiny.ids_T, (150,), Pages(tiny.config, [table_of(TOKENS)]))
        for one in (found, load(merged))
    ]
    assert float(row_errors(*logits).max()) < 1e-5
    assert float(row_errors(logits[0], tiny.logits_TV).max()) > 1e-2


def test_orders_fused_rows_by_kind(tmp_path: Path) -> None:
    """With two key heads of one q, one k, and two v and z of one channel each."""
    linear = read_config(make_tiny_hybrid(tmp_path, 4)).linear
    assert linear is not None
    small = replace(linear, key_heads=2, value_heads=4, key_dim=1, value_dim=1)
    assert small.rows_by_kind("in_proj_qkvz") == [0, 6, 1, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert small.rows_by_kind("in_proj_ba") == [0, 1, 4, 5, 2, 3, 6, 7]
