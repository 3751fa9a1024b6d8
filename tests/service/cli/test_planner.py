"""Compares `deltafront size --gpus` with every possible use of a host's GPUs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import yaml

from deltafront.benchmarks.engine.model import SHAPES as ENGINE_SHAPES
from deltafront.benchmarks.models.public import SERVED, Public
from deltafront.kernels.constants import BLOCK
from deltafront.service.cli import planner, size
from deltafront.service.cli.planner import Demand, best
from deltafront.service.cli.size import GIB, SHAPES, rank_bytes, stage_bytes
from deltafront.service.config import load, parse
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.store import DEFAULT_MODEL, embedded_gguf
from deltafront.workers.settings import KVDtype, Quantisation

from ...workers.tiny_model import make_tiny_model
from .test_main import run

SMALL = replace(SHAPES["8b"], layers=3, kv_heads=6, q_heads=12, intermediate=96, hidden=64, vocab=999)
Choice = tuple[bool, int, int, bool, int]
"""A choice by preference: 16 bits, stages, ranks, separate GPUs, concurrent prompts."""


@pytest.fixture(autouse=True, scope="module")
def _counted_once() -> Iterator[None]:
    """Return a model's shares and their weights, computed once for thousands of plans."""
    with (
        mock.patch.object(ModelConfig, "split", once(ModelConfig.split)),
        mock.patch.object(ModelConfig, "of_rank", once(ModelConfig.of_rank)),
        mock.patch.object(size, "weight_bytes", once(size.weight_bytes)),
    ):
        yield


def once(count: Callable[..., Any]) -> Callable[..., Any]:
    """Cache by the model's id, because a model cannot be hashed. Keep the model, so that its id stays its
    own."""
    known: dict[Any, Any] = {}

    def counted(model: ModelConfig, *args: Any, **named: Any) -> Any:
        key = id(model), args, tuple(named.items())
        if key not in known:
            known[key] = model, count(model, *args, **named)
        return known[key][1]

    return counted


def used(demand: Demand, choice: Choice, decode_tokens: int) -> float:
    """Return the GiB on the fullest GPU, on which the fullest stage may meet a rank."""
    plain, stages, ranks, apart, prompts = choice
    kind: Quantisation | None = None if plain else "fp8"
    context = planner.cache_tokens(demand.tokens)
    how: Any = "bfloat16", kind, demand.kv_dtype
    stage = stage_bytes(demand.model, stages, prompts * context, *how) / GIB
    rank = rank_bytes(demand.model, ranks, decode_tokens, *how) / GIB
    if not apart and stages == ranks == 1:  # it maps the rank's memory, and copies one layer's KV in 16 bits
        layer = context * prompts * 2 * demand.model.kv_heads * demand.model.head_dim * 2 / GIB
        stage = layer if demand.kv_dtype else 0.0
    loads = [stage, rank] if apart else [stage + demand.reserve_gib + rank]
    return max(loads) + demand.reserve_gib


def choices(demand: Demand) -> list[Choice]:
    """Find everything that fits, by trying every choice."""
    context, model = planner.cache_tokens(demand.tokens), demand.model
    held = context + BLOCK * (min(32, demand.tokens // BLOCK - 1) + 2)  # 32 blocks and the rest of the prompt
    ranks = [n for n in range(1, demand.gpus + 1) if model.kv_heads % n == 0 and model.intermediate % n == 0]
    stages = range(1, min(demand.gpus, model.layers) + 1)
    return [
        choice
        for choice in itertools.product((True, False), stages, ranks, (True, False), (1, 2))
        if not choice[3] or choice[1] + choice[2] <= demand.gpus
        if used(demand, choice, max(choice[4], demand.concurrency) * held) <= demand.gpu_gib
    ]


@pytest.mark.parametrize(("concurrency", "kv_dtype"), [(1, None), (3, None), (1, "int8")])
@pytest.mark.parametrize("tokens", [1000, 131_072, 524_288])
@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("gib", [24.0, 78.1, 137.7])
@pytest.mark.parametrize("model", [SHAPES["8b"], SHAPES["70b"]], ids=["8b", "70b"])
def test_planner_chooses_the_best_configuration_that_fits(
    model: ModelConfig, gib: float, gpus: int, tokens: int, concurrency: int, kv_dtype: KVDtype | None
) -> None:
    held = {"tokens": tokens, "concurrency": concurrency, "kv_dtype": kv_dtype}
    demand = Demand(model=model, gpus=gpus, gpu_gib=gib, **held)
    fitting, found = choices(demand), best(demand)
    assert (found is None) == (not fitting)
    if found is None:
        check_that_too_little_is_explained(demand)
        return
    use, context = found.use, planner.cache_tokens(tokens)
    prompts = found.prefill_tokens // context
    if use.mapped:
        assert found.prefill_tokens == found.decode_tokens, "the same pages"
        prompts = min(prompts, 2)
    chosen = (use.quantisation is None, use.stages, use.ranks, not use.beside, prompts)
    assert chosen == max(fitting)
    assert used(demand, chosen, found.decode_tokens) <= gib < used(demand, chosen, found.decode_tokens + 16)


def check_that_too_little_is_explained(demand: Demand) -> None:
    missing = planner.missing_bytes(demand)
    assert best(replace(demand, gpu_gib=demand.gpu_gib + missing / GIB + 1e-6)) is not None
    assert best(replace(demand, gpu_gib=demand.gpu_gib + missing / GIB / 2 - 1e-6)) is None
    longest = planner.longest(demand)
    for tokens in (16, 256, 1000, 50_000, 131_072):
        if tokens < demand.tokens and best(replace(demand, tokens=tokens)):
            assert longest is not None and longest.tokens >= tokens
    if longest is not None and longest.tokens >= 256:
        assert best(replace(demand, tokens=longest.tokens)) == longest
        assert best(replace(demand, tokens=longest.tokens + 16)) is None
    needed = planner.gpus_needed(demand)
    fitting = [n for n in range(1, 17) if best(replace(demand, gpus=n))]
    assert needed == (fitting[0] if fitting else None)


@pytest.mark.parametrize("gib", [16.5, 24.0])
@pytest.mark.parametrize("gpus", [1, 2, 5, 16])
def test_plan_keeps_ranks_and_stages_within_heads_and_layers(gpus: int, gib: float) -> None:
    demand = Demand(model=SMALL, gpus=gpus, gpu_gib=gib, tokens=4096)
    for use in planner.uses(demand):
        assert use.stages <= min(3, gpus) and SMALL.kv_heads % use.ranks == 0 and use.ranks <= gpus
        assert use.quantisation is None or SMALL.intermediate // use.ranks % 16 == 0
    found = best(demand)
    assert found is not None and found.use.stages == min(3, gpus)


@pytest.mark.parametrize("arguments", [("8b", "1x80"), ("70b", "4x80"), ("70b", "8x80"), ("8b", "5x80")])
def test_size_command_writes_a_configuration_that_serves_the_model(
    arguments: tuple[str, str], tmp_path: Path
) -> None:
    name, gpus = arguments
    done = run("size", name, "--gpus", gpus, "--write", tmp_path / "host.yaml")
    assert done.exit_code == 0, done.output
    config = load(tmp_path / "host.yaml")
    config.check_against(SHAPES[name], None)
    host = int(gpus[0])
    assert config.prefill.stages <= host and config.decode.tensor_parallel <= host
    stages = config.prefill.stages * config.prefill.gpus_per_stage
    assert stages + config.decode.tensor_parallel * config.decode.gpus <= host
    assert (config.handoff.transport == "mapped") == (host == 1)
    comments = [line for line in (tmp_path / "host.yaml").read_text().splitlines() if line.startswith("# ")]
    assert [line.removeprefix("# ") for line in comments] == done.stdout.splitlines()
    assert f"decode.cache_tokens {config.decode.cache_tokens:,}" in done.stdout


@pytest.mark.parametrize(("gpus", "tokens"), [("1x141", 131_072), ("2x141", 131_072), ("4x141", 262_144)])
def test_plan_for_a_hybrid_counts_its_states(gpus: str, tokens: int) -> None:
    count, _, gib = gpus.partition("x")
    shape = replace(ENGINE_SHAPES["next-16"], positions=tokens)
    demand = Demand(model=shape, gpus=int(count), gpu_gib=float(gib), tokens=tokens)
    found = best(demand)
    assert found is not None and found.use.ranks == 1 and found.use.quantisation is None
    settings = parse(planner.configuration(demand, found, "somewhere"))
    settings.check_against(shape, None)
    assert settings.prefill.warmed_up == [("dense", {})]
    state = 12 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    slots = settings.decode.state_slots + 1
    kv = found.decode_tokens * 4 * 2 * 2 * 256 * 2
    weights = size.weight_bytes(shape, range(16), "bfloat16", None)
    assert found.rank_bytes == weights + slots * state + kv
    assert settings.decode.state_slots == 160 and settings.door.state_spacing == 16_384


def test_plan_quantises_a_hybrid_that_does_not_fit_in_16_bits() -> None:
    """All 48 layers of Qwen3-Next-80B-A3B: 148 GiB of weights, or 75 in FP8."""
    shape = ENGINE_SHAPES["next-16"]
    assert shape.linear is not None
    linear = replace(shape.linear, layers=tuple(n for n in range(48) if n % 4 != 3))
    shape = replace(shape, layers=48, linear=linear)
    found = best(demand := Demand(model=shape, gpus=1, gpu_gib=141, tokens=131_072))
    assert found is not None and found.use.quantisation == "fp8" and found.use.mapped
    settings = parse(planner.configuration(demand, found, "somewhere"))
    settings.check_against(shape, None)
    wide, weights = (size.weight_bytes(shape, range(48), "bfloat16", kind) for kind in (None, "fp8"))
    assert settings.model.quantisation == "fp8" and 148 < wide / GIB < 149 and 75 < weights / GIB < 76
    states = (settings.decode.state_slots + 1) * shape.state_bytes(range(48), 2)
    assert found.rank_bytes == weights + states + found.decode_tokens * 12 * 2 * 2 * 256 * 2


GEMMA_27B = ENGINE_SHAPES["gemma-27b"]


def test_plan_for_windows_keeps_only_their_window() -> None:
    demand = planner.rolling(Demand(model=GEMMA_27B, gpus=1, gpu_gib=139, tokens=131_072))
    found = best(demand)
    assert demand.model.rolling_buffer and found is not None
    settings = parse(planner.configuration(demand, found, "somewhere"))
    settings.check_against(demand.model, None)
    assert settings.model.rolling_buffer and settings.recompute_blocks_of(demand.model) == 0
    state = 52 * 1040 * 2 * 16 * 128 * 2
    kv = 131_072 * 10 * 2 * 16 * 128 * 2
    assert kv + 2 * state < 11 * size.GIB, "62 GiB with the KV of all tokens"
    weights = size.weight_bytes(GEMMA_27B, range(62), "bfloat16", None)
    slots = settings.decode.state_slots
    pages = found.decode_tokens * 10 * 2 * 16 * 128 * 2
    assert found.rank_bytes == weights + (slots + 1) * state + pages
    assert slots * state <= 0.25 * (slots * state + pages) + state and slots >= 4
    assert state <= 0.25 * settings.door.state_spacing * 10 * 2 * 16 * 128 * 2
    sized = size.sizing("gemma", GEMMA_27B, 131_072, 4, 139.0)
    assert sized.rolling_buffer and sized.kv_bytes == kv + 2 * state


def test_windows_keep_all_tokens_where_rolling_buffers_do_not_go() -> None:
    demand = Demand(model=GEMMA_27B, gpus=1, gpu_gib=139, tokens=65_536)
    for other in ({"ranks": 2}, {"gpus": 8}, {"model": SHAPES["8b"]}):
        wanted = replace(demand, **other)
        assert planner.rolling(wanted) == wanted, other
    sized = size.sizing("gemma", GEMMA_27B, 131_072, 1, 139.0, ranks=2)
    assert not sized.rolling_buffer and sized.kv_token_bytes == 62 * 2 * 16 * 128 * 2


def test_host_memory_has_states_in_the_same_proportion_as_the_gpu() -> None:
    demand = planner.rolling(Demand(model=GEMMA_27B, gpus=1, gpu_gib=139, tokens=131_072, concurrency=4))
    found = best(demand)
    assert found is not None
    pages, state = found.decode_tokens * 10 * 2 * 16 * 128 * 2, 52 * 1040 * 2 * 16 * 128 * 2
    kept = planner.kept_gib(demand, found)
    assert kept * size.GIB == pages + found.state_slots * state
    twice = planner.explained(replace(demand, host_cache_gib=2 * kept), found)
    (line,) = (line for line in twice if "host_cache_gib" in line)
    tokens = int(line.split("host memory for ")[1].split(" cached")[0].replace(",", ""))
    assert abs(tokens - 2 * found.decode_tokens) <= 16, "as many times the pages as the states"


def test_longest_context_of_windows_has_rolling_buffers() -> None:
    demand = Demand(model=GEMMA_27B, gpus=1, gpu_gib=100, tokens=131_072)
    assert best(demand) is None and best(planner.rolling(demand)) is not None
    little = planner.rolling(replace(demand, gpu_gib=80, quantisations=(None,)))
    found = planner.longest(little)
    assert little.model.rolling_buffer and found is not None and 90_000 < found.tokens < 131_072


def test_size_command_suggests_int8_kv_if_16_bit_kv_does_not_fit(tmp_path: Path) -> None:
    asked = ("size", "8b", "--gpus", "1x40")
    refused = run(*asked)
    assert refused.exit_code == 1
    assert "an 8-bit KV cache makes them fit: --kv-dtype int8" in refused.stderr
    done = run(*asked, "--kv-dtype", "int8", "--write", tmp_path / "narrow.yaml")
    assert "decode.kv_dtype int8: KV cache in 8 bits, as requested" in done.stdout
    assert load(tmp_path / "narrow.yaml").decode.kv_dtype == "int8"
    assert "--kv-dtype" not in run("size", "70b", "--gpus", "1x80").stderr


def test_reports_but_does_not_write_a_context_beyond_the_models(tmp_path: Path) -> None:
    asked = ("size", "8b", "--gpus", "8x80", "--tokens", 524_288)
    said = "model.max_position_embeddings 524288: the model has 131,072; for more, serve requires YaRN"
    assert said in run(*asked).stdout
    refused = run(*asked, "--write", tmp_path / "long.yaml")
    assert refused.exit_code == 1 and "524288, but the model has 131072 positions: more" in refused.stderr
    assert not (tmp_path / "long.yaml").exists()
    plain = run("size", "8b", "--tokens", 524_288, "--tokens", 131_072, "--json")
    assert plain.exit_code == 0 and len(plain.stdout.splitlines()) == 2
    assert plain.stderr.count("8b: model.max_position_embeddings 524288: the model has 131,072") == 1


def test_a_model_directory_is_planned_for(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny")
    done = run("size", directory, "--gpus", "2x24", "--json", "--write", tmp_path / "tiny.yaml")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["configuration"] == yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    assert load(tmp_path / "tiny.yaml").model.path == str(directory.resolve())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["70b", "--gpus", "2x80"], "131,072 tokens do not fit: the fullest GPU lacks 38.9 GiB"),
        (["70b", "--gpus", "2x80"], "3,952 tokens fit: --tokens 3952\n4 such GPUs are enough"),
        (["70b", "--gpus", "1x9"], "16 such GPUs are not enough either"),
        (["8b", "--gpus", "8"], "--gpus 8: give a count and GB of memory, such as 8x80"),
        (["8b", "--gpus", "0x80"], "--gpus 0x80: give a count"),
        (["8b", "--gpus", "8xinf"], "--gpus 8xinf: give a count"),
        (["8b", "70b", "--gpus", "8x80"], "takes one model"),
        (["8b", "--gpus", "8x80", "--tokens", 0], "tokens = 0"),
        (["8b", "--gpus", "8x80", "--tensor-parallel", 3], "the GPUs cannot be used"),
        (["8b", "--gpus", "8x80", "--dtype", "float32", "--quantisation", "fp8"], "goes with a dtype of 16"),
        (["8b", "--write", "x.yaml"], "--write: goes with --gpus"),
    ],
)
def test_error_says_why_a_model_cannot_be_planned(arguments: list[object], named: str) -> None:
    done = run("size", *arguments)
    assert done.exit_code == 1
    assert named in done.stderr


@pytest.mark.parametrize("public", SERVED, ids=lambda public: str(public.name))
def test_serve_takes_the_configuration_that_size_writes(public: Public, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(public.config))
    file = tmp_path / "host.yaml"
    done = run("size", tmp_path, "--gpus", "8x192", "--write", file)
    assert done.exit_code == 0, done.output
    settings = load(file)
    settings.check_against(read_config(settings.model.path, settings.model.overrides), None)
    assert settings.prefill.device == settings.decode.device == "cuda"


def test_size_refuses_heads_that_gpu_kernels_lack(tmp_path: Path) -> None:
    """Heads of 96 channels are padded, but not if they have norms."""
    public = next(public for public in SERVED if public.name == "Qwen/Qwen3-8B")
    (tmp_path / "config.json").write_text(json.dumps(public.config | {"head_dim": 96}))
    done = run("size", tmp_path, "--gpus", "8x192", "--write", tmp_path / "host.yaml")
    says = "prefill.device: a GPU takes heads of .* channels there, the model's have 96"
    assert done.exit_code == 1 and re.search(says, done.stderr.replace("\n", " "))
    assert not (tmp_path / "host.yaml").exists()
    plain = run("size", tmp_path, "--tokens", 4096)
    assert plain.exit_code == 0
    assert "its heads have 96 channels, so it is served on CPUs alone" in plain.stderr


def test_size_command_plans_for_gguf_files_and_hub_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub model's weights are not downloaded."""
    directory, asked = make_tiny_model(tmp_path / "tiny"), []
    for file in directory.glob("*.safetensors"):
        file.unlink()

    def fetched(model: str, allow_patterns: list[str], **_more: object) -> str:
        asked.append((model, allow_patterns))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    done = run("size", "owner/name", "--gpus", "2x24", "--write", tmp_path / "hub.yaml")
    assert done.exit_code == 0, done.output
    assert asked == [("owner/name", ["*.json"])] and load(tmp_path / "hub.yaml").model.path == "owner/name"
    for name in (embedded_gguf(), DEFAULT_MODEL):
        done = run("size", name, "--gpus", "2x24", "--write", tmp_path / "file.yaml")
        assert done.exit_code == 0, done.output
        assert load(tmp_path / "file.yaml").model.path == str(name)
    assert "no model 'nowhere'" in run("size", "nowhere").stderr


def test_size_command_keeps_the_options_that_are_given() -> None:
    done = run("size", "8b", "--gpus", "4x80", "--stages", 1, "--tensor-parallel", 2, "--quantisation", "fp8")
    for line in ("prefill.stages 1:", "decode.tensor_parallel 2:", "decode.gpus 1:", "as requested"):
        assert line in done.stdout


def test_size_command_writes_and_prints_host_cache_size(tmp_path: Path) -> None:
    file = tmp_path / "host.yaml"
    done = run("size", "8b", "--gpus", "8x80", "--host-cache-gib", "64", "--write", file)
    assert "decode.host_cache_gib 64: pinned host memory" in done.stdout
    assert "524,288 cached tokens" in done.stdout and load(file).decode.host_cache_gib == 64.0
    assert "host_cache_gib" not in run("size", "8b", "--gpus", "8x80").stdout
    chosen = run("size", "8b", "--gpus", "1x80", "--host-gib", "300", "--write", file)
    kept = load(file).decode.cache_tokens * 131_072 / 2**30
    assert load(file).decode.host_cache_gib == int(2 * kept) < 150
    assert f"at most 2 × the GPUs' {kept:.0f} and 50% of 300 free" in chosen.stdout
    scarce = run("size", "8b", "--gpus", "1x80", "--host-gib", "60", "--write", file)
    assert "decode.host_cache_gib 0: it would hold no more" in scarce.stdout
    assert load(file).decode.host_cache_gib == 0.0
    both = run("size", "8b", "--gpus", "1x80", "--host-gib", "60", "--host-cache-gib", "8")
    assert both.exit_code == 1 and "--host-gib" in both.stderr
    failed = run("size", "8b", "--gpus", "8x80", "--host-cache-gib", "-1")
    assert failed.exit_code == 1 and "host_cache_gib = -1" in failed.stderr
