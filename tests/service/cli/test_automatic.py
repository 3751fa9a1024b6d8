"""Without a configuration file, `serve` uses the machine's GPUs as `size` plans them, or its CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltafront.service.cli.automatic import CPU_TOKENS, Wishes, choose
from deltafront.service.cli.planner import Demand, best, configuration
from deltafront.service.cli.size import SHAPES, host_gib
from deltafront.service.config import ConfigError, parse
from deltafront.service.local.machine import Gpu, Machine

EIGHT, SEVENTY = SHAPES["8b"], SHAPES["70b"]


def machine(count: int, gib: float = 80.0, free_gib: float = 0.0) -> Machine:
    return Machine((Gpu("H100", gib),) * count, None if count else "there is no NVIDIA driver", free_gib)


def test_serve_chooses_the_plan_of_size_for_all_gpus() -> None:
    for count, model in ((1, EIGHT), (2, EIGHT), (8, SEVENTY)):
        demand = Demand(model=model, gpus=count, gpu_gib=80.0, tokens=model.positions)
        plan = best(demand)
        assert plan is not None
        wanted = configuration(demand, plan, "here")
        wanted["model"]["max_position_embeddings"] = model.positions
        choice = choose(model, "here", machine(count), Wishes())
        assert choice.content == wanted
        assert parse(choice.content, "--model").prefill.device == "cuda"


def test_one_gpu_is_shared_by_prefill_and_decode() -> None:
    choice = choose(EIGHT, "here", machine(1), Wishes())
    settings = parse(choice.content, "--model")
    assert (settings.handoff.transport, settings.prefill.stages) == ("mapped", 1)
    assert choice.lines[0] == "1 × H100, prefill and decode share it, weights bfloat16, KV cache bfloat16"
    assert choice.lines[1].startswith("131,072 tokens of prompt and answer; KV cache for ")


def test_uses_int8_kv_if_16_bits_do_not_fit() -> None:
    long = replace(EIGHT, positions=524_288)
    choice = choose(long, "here", machine(1), Wishes())
    assert choice.content["decode"]["kv_dtype"] == "int8"
    assert choice.content["model"]["max_position_embeddings"] == 524_288


def test_biased_keys_keep_16_bits_and_a_shorter_context() -> None:
    biased = replace(EIGHT, positions=524_288, qkv_bias=True)
    choice = choose(biased, "here", machine(1), Wishes())
    assert "kv_dtype" not in choice.content["decode"]
    assert 131_072 < choice.content["model"]["max_position_embeddings"] < 524_288
    with pytest.raises(ConfigError, match=r"do not fit .* with the KV cache in 16 bits"):
        choose(biased, "here", machine(1), Wishes(max_model_len=524_288))


def test_serves_and_prints_the_longest_context_that_fits() -> None:
    choice = choose(EIGHT, "here", machine(1, 33.0), Wishes())
    tokens = choice.content["model"]["max_position_embeddings"]
    assert 1024 < tokens < EIGHT.positions
    assert choice.lines[1].startswith(f"{tokens:,} tokens of prompt and answer (the model has 131,072)")
    says = rf"131,072 tokens .* do not fit 1 × 33 GiB.*--max-model-len {tokens}"
    with pytest.raises(ConfigError, match=says):
        choose(EIGHT, "here", machine(1, 33.0), Wishes(max_model_len=131_072))


def test_error_says_how_many_gpus_the_model_would_need() -> None:
    with pytest.raises(ConfigError, match=r"; \d+ such GPUs are enough$"):
        choose(SEVENTY, "here", machine(1), Wishes())


@pytest.mark.parametrize(
    ("wishes", "keys"),
    [
        ({"gpus": 2}, {"stages": 2, "tensor_parallel": 2}),
        ({"stages": 3, "tensor_parallel": 1}, {"stages": 3, "tensor_parallel": 1}),
    ],
)
def test_flags_override_the_automatic_plan(wishes: dict[str, Any], keys: dict[str, int]) -> None:
    content = choose(EIGHT, "here", machine(4), Wishes(**wishes)).content
    found = {"stages": content["prefill"]["stages"], "tensor_parallel": content["decode"]["tensor_parallel"]}
    assert found == keys


@pytest.mark.parametrize("wishes", [{"gpus": 0}, {"device": "cpu"}])
def test_serves_on_cpus_on_request(wishes: dict[str, Any]) -> None:
    choice = choose(EIGHT, "here", machine(2), Wishes(**wishes))
    settings = parse(choice.content, "--model")
    assert (settings.prefill.device, settings.decode.device) == ("cpu", "cpu")
    assert choice.lines == ("CPUs, as requested", f"{CPU_TOKENS:,} tokens of prompt and answer")
    assert settings.prefill.cache_tokens == CPU_TOKENS


def test_serve_says_why_it_falls_back_to_cpus() -> None:
    choice = choose(EIGHT, "here", machine(0), Wishes(max_model_len=1000))
    assert choice.lines == ("CPUs, there is no NVIDIA driver", "1,000 tokens of prompt and answer")
    assert parse(choice.content, "--model").prefill.cache_tokens == 1008


def test_serves_on_cpus_if_gpu_kernels_lack_the_head_size() -> None:
    choice = choose(replace(EIGHT, head_dim=96), "here", machine(1), Wishes())
    assert choice.lines[0].startswith("CPUs, GPUs take heads of 64, 128, 256 channels, this model's")


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"device": "cuda"}, "no GPU can be used: there is no NVIDIA driver; --device cpu"),
        ({"gpus": 1}, "no GPU can be used"),
        ({"stages": 0}, "--stages 0: must be at least 1"),
        ({"gpus": -1}, "--gpus -1: must be at least 0"),
    ],
)
def test_refuses_gpus_that_the_machine_lacks(wishes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(EIGHT, "here", machine(0), Wishes(**wishes))


def test_refuses_more_gpus_than_there_are() -> None:
    with pytest.raises(ConfigError, match="--gpus 3: this machine has 2"):
        choose(EIGHT, "here", machine(2), Wishes(gpus=3))


def test_refuses_flags_that_no_plan_can_satisfy() -> None:
    with pytest.raises(ConfigError, match="cannot be used with such --stages and --tensor-parallel"):
        choose(EIGHT, "here", machine(2), Wishes(tensor_parallel=3))


def test_host_cache_is_larger_than_the_gpu_kv_cache_or_off() -> None:
    assert host_gib(free_gib=100.0, kept_gib=40.0) == 50.0
    assert host_gib(free_gib=1000.0, kept_gib=40.0) == 80.0
    assert host_gib(free_gib=60.0, kept_gib=40.0) == 0.0
    choice = choose(EIGHT, "here", machine(1, free_gib=200.0), Wishes())
    assert choice.content["decode"]["host_cache_gib"] > 0
    assert "GiB of host memory for the prefix cache (at most 2 × the GPUs' " in choice.lines[0]
