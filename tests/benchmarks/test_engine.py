"""Tests the parts of the engine benchmark that need no service."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.benchmarks import tables
from deltafront.benchmarks.engine import measure, peer_attention, peers, rows
from deltafront.benchmarks.engine.__main__ import Run, parsed
from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.products import matrices, products, products_s
from deltafront.benchmarks.engine.setup import Setup, delta_layers, dpxa_share
from deltafront.kernels.attention.dense import cpu_attend
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.layers.fp8 import quantise_rows
from deltafront.kernels.selectors.rules import cpu
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.service.config import ConfigError, parse
from deltafront.service.request.answers import Density, GenerateFinished, Timings
from deltafront.tests.numerics import assert_rows_close, random_input
from deltafront.workers.messages.events import FinishReason, Usage
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.layer_config import MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.weights.sources import open_weights

from ..workers.tiny_model import whole_stack

SHAPE = replace(SHAPES["tiny"], layers=3, positions=2048)
MIXTURE = replace(
    SHAPES["30b-a3b"],
    layers=3,
    hidden=128,
    intermediate=64,
    q_heads=4,
    kv_heads=2,
    vocab=512,
    positions=2048,
    mixture=MixtureConfig(experts=4, per_token=2, normed=True),
)


MIXED = replace(
    SHAPES["air-8"],
    **{name: getattr(MIXTURE, name) for name in ("layers", "hidden", "intermediate", "q_heads", "kv_heads")},
    vocab=512,
    positions=2048,
    mixture=replace(MIXTURE.mixture, sigmoid=True, shared_width=64, dense_layers=(0,), dense_width=192),
)
WINDOWS = replace(
    SHAPES["gemma-12b"],
    layers=3,
    hidden=128,
    intermediate=64,
    q_heads=4,
    kv_heads=2,
    vocab=512,
    positions=2048,
    embedding_scale=128**0.5,
    window_layers=(0, 2),
)


NEXT = SHAPES["next-16"]
assert NEXT.linear is not None and NEXT.mixture is not None
HYBRID = replace(
    NEXT,
    layers=4,
    hidden=128,
    intermediate=64,
    q_heads=2,
    kv_heads=1,
    head_dim=64,
    rotary_dim=16,
    vocab=512,
    positions=2048,
    mixture=replace(NEXT.mixture, experts=8, per_token=2, shared_width=32),
    linear=replace(NEXT.linear, layers=(0, 1, 2), key_heads=2, value_heads=4, key_dim=16, value_dim=32),
)


@pytest.mark.parametrize(
    "shape", [SHAPE, MIXTURE, MIXED, WINDOWS, HYBRID], ids=lambda shape: shape.architecture
)
def test_workers_load_the_written_model_directory(tmp_path: Path, shape: ModelConfig) -> None:
    write_model(tmp_path, shape, torch.device("cpu"))
    config = read_config(tmp_path)
    assert config == shape
    check_weights(tmp_path, config)
    stack = whole_stack(tmp_path)
    logits_TV = stack.logits(stack.embed(torch.arange(5)))
    assert logits_TV.isfinite().all() and logits_TV.std() > 0
    shards = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(shards) == 1 + shape.layers
    write_model(tmp_path, replace(shape, positions=4096), torch.device("cpu"))
    assert read_config(tmp_path).positions == 4096
    assert shards == {path: path.stat().st_mtime_ns for path in shards}, "made again"
    write_model(tmp_path, replace(shape, intermediate=128), torch.device("cpu"))
    assert read_config(tmp_path).intermediate == 128
    assert shards != {path: path.stat().st_mtime_ns for path in shards}


@pytest.mark.parametrize("shape", [SHAPE, MIXED, HYBRID], ids=lambda shape: shape.architecture)
def test_fp8_files_contain_the_quantised_16_bit_weights(tmp_path: Path, shape: ModelConfig) -> None:
    sources = []
    for fp8_files in (False, True):
        write_model(tmp_path / str(fp8_files), shape, torch.device("cpu"), fp8_files=fp8_files)
        check_weights(tmp_path / str(fp8_files), read_config(tmp_path / str(fp8_files)))
        sources.append(open_weights(tmp_path / str(fp8_files)))
    wide, narrow = sources
    for name, size in shape.shapes().items():
        plain, found = wide.read(name), narrow.read(name)
        kept = name.split(".")[-2] in ("gate", "shared_gate", "in_proj_ba")
        rounded = ".layers." in name and len(size) == 2 and not kept
        meant = quantise_rows(plain).dequantised(torch.float32) if rounded else plain
        assert torch.equal(found, meant)


@pytest.mark.parametrize("density", [0.25, 0.6])
def test_share_option_computes_the_requested_share_of_tiles(density: float) -> None:
    tokens = 8192
    blocks = tokens // 128
    share = dpxa_share(density, tokens)
    score_BHNM = torch.rand(1, 2, blocks, blocks, generator=torch.Generator().manual_seed(3)).tril()
    mask = cpu.select(score_BHNM, Rule("top_k", share, 1, 5), 0)
    mean = float(mask.count_BHN.sum()) / (blocks * (blocks + 1))
    assert mean == pytest.approx(density, abs=0.01)
    with pytest.raises(ValueError, match="sink and window alone"):
        dpxa_share(0.1, tokens)


def test_written_configuration_is_accepted_by_the_service(tmp_path: Path) -> None:
    setup = Setup(tmp_path, SHAPES["8b"], 131_072, [131_072] * 4, stages=2, decode_gpu="last")
    config = parse(setup.content())
    assert setup.gpus == 2
    assert config.prefill.gpus_per_stage > 0.5, "two stages would share a GPU"
    assert config.prefill.gpus_per_stage + config.decode.gpus <= 1
    assert config.decode.cache_tokens >= 4 * 131_072 and config.prefill.cache_tokens >= 131_072
    assert config.prefill.method("fa2").module == peers.__name__
    assert config.prefill.method("dpxa").values["share"] > 0, "warm-up would meet another rule"
    config.check_against(SHAPES["8b"], None)
    hybrid = replace(setup, shape=NEXT, stages=1, decode_gpu="mapped")
    parse(hybrid.content()).check_against(NEXT, None)

    own = replace(setup, decode_gpu="own", more={"decode.page_budget": 64, "model.dtype": "float16"})
    config = parse(own.content())
    assert (config.prefill.gpus_per_stage, config.decode.gpus) == (1, 1)
    assert (config.decode.page_budget, config.model.dtype) == (64, "float16")
    assert own.fullest_gib() < setup.fullest_gib()

    longest = replace(setup, tokens=524_288, sessions=(), stages=1, decode_gpu="none")
    config = parse(longest.content())
    assert (config.prefill.device, config.decode.device, config.decode.gpus) == ("cuda", "cpu", 0)
    assert config.handoff.transport == "object_store"
    assert longest.fullest_gib() < replace(longest, decode_gpu="last").fullest_gib() / 1.5
    with pytest.raises(ConfigError, match=r"model\.nonsense"):
        parse(replace(setup, more={"model.nonsense": 1}).content())


def test_chooses_four_delta_layers_spread_over_the_depth() -> None:
    assert delta_layers(32) == [5, 13, 20, 28]
    assert all(2 <= layer < layers for layers in (4, 6, 80) for layer in delta_layers(layers))


def test_command_line_sets_configuration_and_method_options(tmp_path: Path) -> None:
    given = [
        "--shape",
        "tiny",
        "--tokens",
        "1024",
        "2048",
        "--densities",
        "0.9",
        "0.7",
        "--stages",
        "1",
        "2",
    ]
    given += ["--set", "decode.page_budget=64", "handoff.ack_timeout_s=30.5", "--quantisation", "fp8"]
    run = Run(parsed([*given, "--model", str(tmp_path), "--commit", "abc"]))
    setup = run.setup(2, None)
    narrow = run.setup(1, "int8")
    assert run.setup(1, None, "fp8").model == tmp_path.with_name(f"{tmp_path.name}-fp8-files")
    assert (setup.content()["decode"]["kv_dtype"], narrow.content()["decode"]["kv_dtype"]) == (None, "int8")
    assert narrow.fullest_gib() < run.setup(1, None).fullest_gib()
    assert setup.more == {
        "decode.page_budget": 64,
        "handoff.ack_timeout_s": 30.5,
        "model.quantisation": "fp8",
    }
    assert (setup.stages, setup.tokens, run.mark) == (2, 2048, "_fp8")
    assert run.options("dense", 1024) == {}
    assert run.options("dpxa", 2048)["share"] == pytest.approx(dpxa_share(0.7, 2048))
    assert run.prompts(2, 64, 0) != run.prompts(2, 64, 1)
    with pytest.raises(SystemExit):
        parsed(["--tokens", "1024", "2048", "--densities", "0.5"])


class FakeClient:
    """A client that answers at once and reports `recomputed_tokens` recomputed tokens."""

    def __init__(self, recomputed_tokens: int) -> None:
        self.recomputed_tokens, self.asked = recomputed_tokens, list[dict[str, Any]]()

    def generate(self, ids: Sequence[int], **asked: Any) -> Iterator[GenerateFinished]:
        self.asked.append({"ids": list(ids), **asked})
        timings, usage = Timings(2.0, {}, [], 2.0), Usage(prompt_tokens=len(ids), completion_tokens=1)
        again = self.recomputed_tokens
        yield GenerateFinished(
            FinishReason.LENGTH, "", usage, timings, Density(), None, 1.0, "", recomputed_tokens=again
        )


def test_asks_for_recomputed_blocks_with_a_question() -> None:
    client = FakeClient(8 * 128)
    measure.first_token(client, [1, 2], "dpxa", {"share": 0.5}, 8)  # type: ignore[arg-type]
    (asked,) = client.asked
    assert (asked["ids"], asked["method"], asked["options"]) == ([1, 2], "dpxa", {"share": 0.5})
    assert len(asked["append"]) == measure.APPENDED and asked["recompute_blocks"] == 8
    with pytest.raises(RuntimeError, match="1024 tokens were recomputed, not 0 blocks"):
        measure.first_token(client, [1, 2], "dpxa", {}, 0)  # type: ignore[arg-type]


def test_benchmark_sends_no_question_without_recomputed_blocks() -> None:
    client = FakeClient(0)
    measure.first_token(client, [1, 2], "dense", {})  # type: ignore[arg-type]
    assert not {"append", "recompute_blocks"} & set(client.asked[0])


def test_benchmark_times_tokens_only_while_all_streams_run() -> None:
    first, late = [float(n) for n in range(20)], [n + 4.5 for n in range(10)]
    assert measure.spans_together([first]) == [8.0] * 12
    assert measure.spans_together([first, late]) == [8.0] * 3  # from seconds 5, 4.5 and 5.5
    assert measure.spans_together([first[:5], late]) == []
    in_pairs = [2.0 * (n // 2) for n in range(20)]
    assert set(measure.spans_together([in_pairs])) == {8.0}


def test_adds_up_compilations_of_all_workers() -> None:
    text = """# TYPE deltafront_kernel_compilations gauge
deltafront_kernel_compilations{phase="warm_up",worker="decode:1"} 40.0
deltafront_kernel_compilations{phase="serving",worker="decode:1"} 2.0
deltafront_kernel_compilations{phase="serving",worker="prefill:1"} 1.0
"""
    assert measure.counted(text) == 3.0
    assert measure.counted("deltafront_requests_total 1.0\n") is None


def ttft(case: str, seconds: float, gpus: int = 1, **parts: float) -> rows.Row:
    return {**rows.row(case, seconds, "s", tokens=1024, gpus=gpus, density=0.5), "parts": parts}


def test_adds_throughput_ratios_of_groups_with_equally_many_stages(tmp_path: Path) -> None:
    one = rows.throughput_row("dpxa", 0.5, 1024, gpus=2, groups=1)
    other = rows.throughput_row("dpxa", 0.3, 1024, gpus=4, groups=1)
    two = rows.throughput_row("dpxa", 0.98, 1024, gpus=4, groups=2)
    made = rows.merge_into(tmp_path / "engine.json", [one, other, two], "GPU", "first")
    found = {row["case"]: row["value"] for row in made["rows"] if row["unit"] == "ratio"}
    assert found == {"groups_2_over_1_dpxa": 1.96}


def test_mapped_and_int8_runs_get_separate_rows(tmp_path: Path) -> None:
    one = {**rows.row("memory", 68.4, "GiB", tokens=1024), "decode_gpu": "last"}
    found = rows.merge_into(
        tmp_path / "r.json",
        [one, {**one, "decode_gpu": "mapped"}, {**one, "kv_dtype": "int8"}, {**one, "decode_gpu": "own"}],
        "GPU",
        "first",
    )
    assert [(row["decode_gpu"], row.get("kv_dtype")) for row in found["rows"]] == [
        ("own", None),
        ("last", "int8"),
        ("mapped", None),
    ]


def test_merges_rows_of_several_runs_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    one = ttft(
        "ttft_dpxa", 4.0, **{"prefill.projection": 3.3, "handoff_exposed": 0.1, "prefill.handoff": 0.1}
    )
    rows.merge_into(path, [one, ttft("ttft_dense", 9.0)], "GPU", "first")
    rows.merge_into(path, [rows.row("linear_products", 3.0, "s", tokens=1024)], "GPU", "first")
    two = ttft("ttft_dpxa", 2.5, gpus=2, **{"prefill.projection": 1.6})
    again = ttft("ttft_dense", 8.0)
    whole = rows.merge_into(path, [two, again], "GPU", "second")
    assert json.loads(path.read_text()) == whole and whole["commit"] == "second"
    found = {rows.key(row): row for row in whole["rows"]}
    assert len(found) == len(whole["rows"])
    assert found["ttft_dense", 1024, 1, 1, ""]["value"] == 8.0, "replaced"
    assert "commit" not in found["ttft_dense", 1024, 1, 1, ""]
    assert found["ttft_dpxa", 1024, 1, 1, ""]["commit"] == "first"
    assert found["projection_ratio", 1024, 1, 1, ""]["value"] == pytest.approx(1.1)
    assert found["handoff_share", 1024, 1, 1, ""]["value"] == pytest.approx(0.05)
    assert found["projection_ratio", 1024, 1, 1, ""]["commit"] == "first"
    assert not {name for name, *_ in found if name.startswith("efficiency")}, "of two commits"
    alone = rows.merge_into(path, [ttft("ttft_dpxa", 4.0)], "GPU", "second")
    assert {row["value"] for row in alone["rows"] if row["case"] == "efficiency_dpxa"} == {0.8}

    table = tables.engine(whole)
    timed = [row for row in whole["rows"] if row["case"].startswith("ttft_")]
    assert table.count("\n|") == len(timed) + 1
    assert "| ttft_dpxa | 1024 | 2 | 0.500 | 2.5 s |" in table


def test_adds_a_row_with_full_decode_time_over_delta_decode_time() -> None:
    made = [
        rows.row(f"batch4_token_{name}", ms, "ms", tokens=512)
        for name, ms in (("full", 20.0), ("delta", 8.0))
    ]
    whole = rows.merged(None, made, "GPU", "abc")
    assert [row["value"] for row in whole["rows"] if row["case"] == "batch4_full_over_delta"] == [2.5]


def test_adds_a_row_with_int8_kv_time_over_16_bit_time() -> None:
    for case, alone in (("batch4_token_full", {}), ("batch4_token_full_fp8", {"decode_gpu": "alone"})):
        made = [{**rows.row(case, 20.0, "ms", tokens=512), **alone}]
        made.append({**rows.row(case, 11.0, "ms", tokens=512), **alone, "kv_dtype": "int8"})
        whole = rows.merged(None, made, "GPU", "abc")
        assert [row["value"] for row in whole["rows"] if row["case"] == case] == [20.0, 11.0]
        (ratio,) = (row for row in whole["rows"] if row["unit"] == "ratio")
        assert ratio["case"] == f"{case}_kv_over_16_bits" and ratio["kv_dtype"] == "int8"
        assert ratio["value"] == 0.55
        assert "K/V int8" in tables.engine(whole)


def test_adds_no_int8_kv_ratio_without_a_16_bit_row() -> None:
    one = {**rows.row("token_full_fp8", 14.0, "ms", tokens=512), "kv_dtype": "int8", "shape": "32b"}
    assert rows.merged(None, [one], "GPU", "abc")["rows"] == [one]


def test_counts_the_gemms_of_each_layer() -> None:
    matrix = sum(out * width for out, width in matrices(SHAPE))
    assert (
        matrix * SHAPE.layers == SHAPE.weights(range(3), embedding=False, head=False) - 2 * 3 * SHAPE.hidden
    )
    assert products_s(SHAPE, 100, 64, torch.device("cpu"), torch.float32, repeats=1) > 0


def test_counts_the_experts_of_one_token_as_one_mlp() -> None:
    router = MIXTURE.hidden * 4
    for shape in (MIXTURE, MIXED):
        macs = sum(out * width for out, width in matrices(shape))
        assert macs == shape.attention_matrices + shape.mlp_macs - router
    assert MIXTURE.mlp_matrices == 2 * (MIXTURE.mlp_macs - router)
    widths = [width for _, _, width in products(MIXED, 64, 64)]
    assert widths[3::4][:2] == [192, 3 * 64], "the first layer has no experts"


def test_the_last_layer_computes_only_the_last_block_after_qkv() -> None:
    every = list(products(SHAPE, 400, 256))
    assert [rows for rows, _, _ in every] == [256] * (2 * 4 + 1) + [144] * (2 * 4 + 1) + [16] * 3
    assert [one[1:] for one in every[8:13]] == [matrices(SHAPE)[0], *matrices(SHAPE)]
    sums = sum(rows * out * width for rows, out, width in every)
    layer = SHAPE.attention_matrices + SHAPE.mlp_matrices
    assert sums == 400 * 3 * layer - 384 * (layer - SHAPE.qkv_matrices)
    whole = list(products(SHAPE, 64, 64))
    assert [rows for rows, _, _ in whole] == [64] * (3 * 4)


@pytest.mark.parametrize("start", [0, 384])
def test_merges_attention_of_a_chunk_from_two_parts_exactly(start: int) -> None:
    """`peer_attention.check` compares the peers' kernels, which need a GPU."""
    whole = random_input(512, q_heads=4, kv_heads=2, seed=5)
    x = AttentionInput.of(whole.q_BHTD[:, :, start:], whole.k_BGSD, whole.v_BGSD, q_start=start)

    def part(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, ...]:
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        logits = q @ k.transpose(2, 3) * scale
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[2:]).tril().bool(), float("-inf"))
        return logits.softmax(-1) @ v, logits.logsumexp(-1)

    assert_rows_close(peer_attention.in_two_parts(x, part), cpu_attend(x))
