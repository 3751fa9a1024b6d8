"""Configuration files: every mistake names the file and the key."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import deltafront
from deltafront.benchmarks.engine.model import SHAPES as ENGINE_SHAPES
from deltafront.kernels import methods
from deltafront.kernels.methods import PRESETS
from deltafront.service import wiring
from deltafront.service.cli.serve import describe_attention
from deltafront.service.cli.size import SHAPES, kv_bytes
from deltafront.service.config import UNMEASURED, ConfigError, DefaultAttention, load, parse
from deltafront.service.settings import MODEL_ID, DoorConfig
from deltafront.service.wiring import check_start
from deltafront.workers.model import family_registry as registry
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.settings import DecodeConfig, HandoffConfig, ModelSpec, pairing

from ..workers.tiny_model import write_weights
from .inprocess import write_model

CONFIGS = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("owner/Model-1.5", "owner/Model-1.5"),
        ("my model, v2", "my-model-v2"),
        ("x + y", "x+y"),
        ("模型", "model"),
    ],
)
def test_a_model_without_a_configured_id_gets_one_without_spaces(name: str, model_id: str) -> None:
    door = wiring._named(DoorConfig(), name)
    assert (door.model_name, door.display_name) == (model_id, name)
    assert MODEL_ID.fullmatch(door.model_name)


def test_display_name_defaults_to_the_model_id() -> None:
    door = wiring._named(DoorConfig(model_name="tiny"), "a directory")
    assert (door.model_name, door.display_name) == ("tiny", "tiny")
    assert wiring._named(DoorConfig(display_name="Tiny"), "m").display_name == "Tiny"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sample_configurations_are_valid(path: Path) -> None:
    config = load(path)
    assert parse(config.model_dump(mode="json")) == config, "it must survive the way through Serve"


def test_configured_values_reach_workers_with_their_types() -> None:
    config = parse({"model": {"path": "m", "rope_theta": "8e6"}, "decode": {"delta_layers": [4, 9]}})
    assert config.model == ModelSpec(path="m", rope_theta=8e6)
    assert config.decode == DecodeConfig(delta_layers=(4, 9))
    assert config.with_model(path="n").model.path == "n"


def test_methods_are_warmed_up_by_name_and_with_options() -> None:
    given = ["dense", {"dpxa": {"q_anchors": 16}, "xattention": {"stride": 16}}, "dpxa"]
    config = parse(content("prefill", warm_up=given))
    many = [("dpxa", {"q_anchors": 16}), ("xattention", {"stride": 16})]
    assert config.prefill.warmed_up == [("dense", {}), *many, ("dpxa", {})]
    assert parse(config.model_dump(mode="json")) == config, "it must survive the way through Serve"


PROFILE = Path(deltafront.__file__).parent / "deploy" / "models" / "smollm2-135m-128k" / "profile.json"


@pytest.mark.parametrize(
    ("changes", "attention", "blocks"),
    [
        ({}, UNMEASURED, 32),
        ({"prefill": {"unmeasured": "allow"}}, DefaultAttention("dpxa", False), 32),
        ({"model": {"path": "m", "profile": str(PROFILE)}}, DefaultAttention("dpxa", True), 32),
        ({"door": {"default_method": "xattention"}}, DefaultAttention("xattention", True), 32),
        ({"door": {"default_method": "dense"}}, DefaultAttention("dense", True), 0),
        ({"decode": {"page_selection": "full", "recompute_blocks": 3}}, UNMEASURED, 3),
    ],
)
def test_default_attention_follows_profile_and_configuration(
    changes: dict[str, Any], attention: DefaultAttention, blocks: int
) -> None:
    config = parse({**content(), **changes})
    assert config.default_attention == attention
    assert config.recompute_blocks == blocks
    assert ("was measured on this model" in describe_attention(config)) != attention.measured


@pytest.mark.parametrize(
    ("warm_up", "unmeasured", "compiled"),
    [
        ([], "safe", []),
        (["dense"], "safe", [("dense", {})]),
        (["dpxa"], "safe", [("dpxa", {}), ("dense", {})]),
        (["dense"], "allow", [("dense", {}), ("dpxa", {})]),
    ],
)
def test_stages_warm_up_the_default_attention(
    warm_up: list[str], unmeasured: str, compiled: list[tuple[str, Any]]
) -> None:
    config = parse(content("prefill", warm_up=warm_up, unmeasured=unmeasured))
    assert config.compiled_prefill.warmed_up == compiled


def content(section: str = "", **values: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": {"path": "m"}, "decode": {"page_selection": "full"}}
    return {**base, section: {**base.get(section, {}), **values}} if section else base


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("prefill", {"stagse": 2}, "unknown key 'prefill.stagse'; did you mean 'stages'?"),
        ("door", {"grpc_prot": 1}, "unknown key 'door.grpc_prot'; did you mean 'grpc_port'?"),
        (
            "door",
            {"model_name": "Tiny, 128K"},
            "door.model_name = 'Tiny, 128K': is an id, of letters, digits",
        ),
        ("model", {"zzz": 1}, "unknown key 'model.zzz'; known: path, adapter"),
        ("prefill", {"chunk_tokens": 500}, "prefill.chunk_tokens = 500: must be a multiple of 128"),
        ("prefill", {"stages": 0}, "prefill.stages = 0: must be greater than or equal to 1"),
        ("prefill", {"warm_up": ["dense", "dpax"]}, "prefill.warm_up: unknown attention method 'dpax'"),
        ("prefill", {"warm_up": ["flex+delta"]}, "prefill.warm_up: flex+delta reads whole prompts only"),
        (
            "door",
            {"default_method": "dpxa", "default_options": {"share": 0.1, "density": 0.1}},
            "door.default_options: ",
        ),
        ("prefill", {"warm_up": [{"dpxa": {"anchors": 8}}]}, "prefill.warm_up: dpxa has no option 'anchors'"),
        (
            "prefill",
            {"warm_up": [{"dpxa": 8}]},
            "prefill.warm_up.0.options.dpxa = 8: must be a valid",
        ),
        ("prefill", {"stages": "many"}, "prefill.stages = 'many'"),
        ("prefill", {"cache_tokens": 100}, "prefill.cache_tokens = 100: must be a multiple of 16"),
        (
            "prefill",
            {"cache_tokens": 256},
            "prefill.cache_tokens = 256: must be at least prefill.chunk_tokens",
        ),
        ("prefill", {"device": "gpu"}, "prefill.device = 'gpu'"),
        ("prefill", {"stream_lease_s": 1.5}, "door.renew_s: must be at most half of prefill.stream_lease_s"),
        ("model", {"dtype": "int8"}, "model.dtype = 'int8': must be 'bfloat16', 'float16' or 'float32'"),
        ("model", {"quantisation": "int4"}, "model.quantisation = 'int4': must be 'fp8'"),
        ("model", {"quantisation": "fp8"}, "model.quantisation: fp8 needs a GPU, and prefill.device is cpu"),
        (
            "model",
            {"quantisation": "fp8", "dtype": "float32"},
            "model.quantisation: fp8 goes with a model.dtype of 16 bits",
        ),
        ("handoff", {"ack_timeout_s": 0}, "handoff.ack_timeout_s = 0: must be greater than 0"),
        (
            "handoff",
            {"transport": "rdma"},
            "handoff.transport = 'rdma': must be 'object_store', 'cuda_ipc', 'nixl' or 'mapped'",
        ),
        (
            "handoff",
            {"transport": "cuda_ipc"},
            "handoff.transport: cuda_ipc needs prefill.device and decode.device to be cuda",
        ),
        (
            "handoff",
            {"transport": "in_process"},
            "handoff.transport = 'in_process': must be 'object_store', 'cuda_ipc', 'nixl' or 'mapped'",
        ),
        (
            "prefill",
            {"groups": 2, "max_groups": 1},
            "prefill.max_groups = 1: must be at least prefill.groups",
        ),
        (
            "decode",
            {"workers": 2, "max_workers": 1},
            "decode.max_workers = 1: must be at least decode.workers",
        ),
        ("decode", {"usage": 1.5}, "decode.usage = 1.5: must be less than or equal to 1"),
        ("handoff", {"acks": 1}, "unknown key 'handoff.acks'; known: transport"),
        ("decode", {"page_selection": "best"}, "decode.page_selection = 'best': must be 'delta' or 'full'"),
        ("decode", {"recency": 0}, "decode.recency = 0: must be greater than or equal to 1"),
        ("decode", {"full_layers": [0, -1]}, "decode.full_layers.1 = -1: must be greater than or equal to 0"),
        ("decode", {"cache_tokens": 100}, "decode.cache_tokens = 100: must be a multiple of 16"),
        ("prefill", {"kernel_cache": "kernels"}, "prefill.kernel_cache = 'kernels'"),
        ("decode", {"kernel_cache": "kernels"}, "decode.kernel_cache = 'kernels'"),
        ("decode", {"store": "kv", "host_cache_gib": 1}, "decode.store = 'kv': "),
        ("decode", {"store": "/kv"}, "decode.store: it needs host_cache_gib"),
        ("decode", {"host_cache_gib": -1}, "decode.host_cache_gib = -1: must be greater than or equal to 0"),
        ("decode", {"warm_up": True, "cache_tokens": 128}, "decode.warm_up: needs cache_tokens"),
        ("decode", {"page_selection": "delta"}, "decode.delta_layers: empty"),
        ("decode", {"recency": 65}, "decode.recency"),
        ("decode", {"delta_layers": [1, 5]}, "full_layers and delta_layers share [1]"),
        ("decode", {"max_session_ttl_s": 60}, "door.default_session_ttl_s: must not exceed"),
        ("decode", {"stream_lease_s": 1.5}, "door.renew_s: must be at most half"),
        ("prefill", {"stall_s": 60}, "prefill.stall_s: must be above handoff.ack_timeout_s"),
        ("door", {"metrics_port": 9000}, "must differ"),
        ("door", {"tls_key": "x"}, "door.tls_certificate and door.tls_key: both are needed"),
        ("door", {"tls_client_ca": "x"}, "door.tls_client_ca: needs door.tls_certificate"),
        ("door", {"tls_certificate": "x", "tls_key": "x", "tls_port": 9000}, "door.tls_port: must differ"),
        ("door", {"token_requests": 3}, "door.tokens_file: missing"),
        ("door", {"token_tokens_per_minute": 3}, "door.tokens_file: missing"),
        ("door", {"default_method": "flex"}, "door.default_method: flex reads whole prompts only"),
        ("door", {"default_method": "nope"}, "door.default_method: unknown attention method 'nope'"),
        ("door", {"default_session_ttl_s": float("nan")}, "door.default_session_ttl_s"),
        ("door", {"grpc_port": 70_000}, "door.grpc_port = 70000"),
    ],
)
def test_configuration_error_names_its_key(
    section: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(content(section, **values)))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_nixl_needs_its_package_and_works_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafront.service.config.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"handoff\.transport: nixl needs the package nixl, .*deltafront\[nixl\]"
    ):
        parse(content("handoff", transport="nixl"))
    monkeypatch.setattr("deltafront.service.config.find_spec", lambda name: name)
    assert parse(content("handoff", transport="nixl")).handoff.transport == "nixl"


MAPPED: dict[str, dict[str, Any]] = {
    "prefill": {"stages": 1, "cache_tokens": 4096},
    "decode": {"cache_tokens": 4096, "page_selection": "full"},
    "handoff": {"transport": "mapped"},
}


@pytest.mark.parametrize(
    ("section", "values", "problem"),
    [
        ("prefill", {"stages": 2}, "prefill.stages = 2: must be 1"),
        ("prefill", {"groups": 2}, "prefill.groups = 2: must be 1"),
        ("prefill", {"max_groups": 3}, "prefill.groups = 3: must be 1"),
        ("decode", {"workers": 2}, "decode.workers = 2: must be 1"),
        ("decode", {"max_workers": 2}, "decode.workers = 2: must be 1"),
        ("decode", {"tensor_parallel": 2}, "decode.tensor_parallel = 2: must be 1"),
        ("decode", {"device": "cuda"}, r"prefill.device = cpu: must be decode.device \(cuda\)"),
        ("decode", {"cache_tokens": 8192}, r"prefill.cache_tokens = 4096: must be .* \(8192\), since both"),
        ("decode", {"surge": True}, "prefill.surge and decode.surge: must be false"),
    ],
)
def test_mapped_transport_requires_one_stage_and_one_decode_worker(
    section: str, values: dict[str, Any], problem: str
) -> None:
    whole = {**content(), **MAPPED}
    assert parse(whole).handoff.transport == "mapped"
    with pytest.raises(ConfigError, match=f"{problem}.*, with handoff.transport: mapped"):
        parse({**whole, section: {**MAPPED.get(section, {}), **values}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not YAML"),
        ("just text", "must hold keys"),
        ("decode: {}", "key 'model' is missing"),
        ("door: {tokens_file: t}\nmodel: {path: m}\ndoor: {}", "key 'door' is there twice"),
    ],
)
def test_error_names_files_that_are_no_configuration(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(path)
    with pytest.raises(ConfigError, match=r"key 'model\.path' is missing"):
        parse({"model": {}})
    with pytest.raises(ConfigError, match="handoff = None: must be a section with keys transport"):
        parse({**content(), "handoff": None})


OUTSIDE = """
from dataclasses import dataclass
from deltafront.kernels.methods import register
@dataclass(frozen=True)
class Options:
    "Of no paper."
register("{0}", Options, None, lambda options: None, source="nowhere")
register("{0}_whole", Options, None, lambda options: None, source="nowhere", whole_prompt=True)
"""


@mock.patch.dict(methods._presets)
def test_configuration_may_name_methods_of_other_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PRESETS
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "methods_of_nobody.py").write_text("")
    (tmp_path / "methods_of_mine.py").write_text(OUTSIDE.format("mine"))
    for module, says in (("methods_not_there", "cannot be imported"), ("methods_of_nobody", "registers no")):
        with pytest.raises(ConfigError, match=f"prefill.method_modules: {module} {says}"):
            parse(content("prefill", method_modules=[module]))
    with pytest.raises(ConfigError, match=r"prefill\.warm_up: unknown attention method 'mine'"):
        parse(content("prefill", warm_up=["mine"]))
    mine: dict[str, Any] = {"method_modules": ["methods_of_mine"], "warm_up": ["mine", "mine+delta"]}
    named = parse({**content("prefill", **mine), "door": {"default_method": "mine"}})
    assert parse(named.model_dump(mode="json")) == named
    with pytest.raises(ConfigError, match=r"door\.default_method: mine_whole reads whole prompts only"):
        parse({**content("prefill", **mine), "door": {"default_method": "mine_whole"}})


OUTSIDE_FAMILY = """
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import register
register(Family(name="Mine", architecture="{0}ForCausalLM", model_type="{0}", fixed={{"qkv_bias": True}}))
"""


@mock.patch.dict(registry.FAMILIES)
def test_configuration_may_name_families_of_other_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "LlamaForCausalLM" in registry.FAMILIES
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "family_of_mine.py").write_text(OUTSIDE_FAMILY.format("Mine"))
    (tmp_path / "family_of_llama.py").write_text(OUTSIDE_FAMILY.format("Llama"))
    for module, says in (
        ("family_not_there", "cannot be imported"),
        ("family_of_llama", "cannot be imported.*'LlamaForCausalLM' is another family's already"),
    ):
        with pytest.raises(ConfigError, match=f"model.family_modules: {module} {says}"):
            parse(content("model", family_modules=[module]))
    named = parse(content("model", family_modules=["family_of_mine"]))
    assert parse(named.model_dump(mode="json")) == named
    assert registry.FAMILIES["MineForCausalLM"].fixed == {"qkv_bias": True}


def test_token_file_path_is_relative_to_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(content("door", tokens_file="secret")))
    assert load(path).door.tokens_file == tmp_path / "secret"


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("door", {"tokens_file": "/nowhere/tokens"}, "door.tokens_file: .*/nowhere/tokens"),
        (
            "decode",
            {"full_layers": [0, 4]},
            r"decode.full_layers names layer 4, but the model has layers 0 \.\. 3",
        ),
        (
            "decode",
            {"host_cache_gib": 1e-6},
            r"decode.host_cache_gib = 1e-06: must be 0, or at least 0\.\d{3}",
        ),
        ("prefill", {"stages": 5}, "prefill.stages: 4 layers cannot be split over 5 stages"),
    ],
)
def test_start_refuses_settings_that_do_not_fit_the_model(
    section: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    base = content(section, **values)
    base["model"] = {"path": str(write_model(tmp_path))}
    write_weights(tmp_path)
    with pytest.raises(ValueError, match=says):
        check_start(parse(base))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_refuses_host_memory_below_a_batch_of_pages(dtype: str, kv_dtype: Any) -> None:
    """A worker itself refuses less memory, too."""
    shape, least = SHAPES["8b"], 256 * 16 * kv_bytes(SHAPES["8b"], 32, dtype, kv_dtype) / 2**30  # type: ignore[arg-type]
    for gib, enough in ((least * 0.99, False), (math.ceil(least * 1000) / 1000, True)):
        given = content("decode", host_cache_gib=gib, kv_dtype=kv_dtype)
        given["model"]["dtype"] = dtype
        with contextlib.nullcontext() if enough else pytest.raises(ConfigError, match="host_cache_gib"):
            parse(given).check_against(shape, None)


def test_refuses_host_memory_without_prefix_reuse() -> None:
    given = content("decode", host_cache_gib=1.0) | {"door": {"prefix_reuse": False}}
    with pytest.raises(ConfigError, match=r"decode.host_cache_gib: needs door.prefix_reuse"):
        parse(given)


def test_a_model_of_odd_widths_cannot_be_quantised(model: Path) -> None:
    given = {
        "model": {"path": str(model), "quantisation": "fp8"},
        "prefill": {"device": "cuda"},
        "decode": {"device": "cuda", "page_selection": "full"},
    }
    shape = replace(read_config(model), head_dim=64)
    parse(given).check_against(shape, None)
    with pytest.raises(ConfigError, match=r"model.quantisation: .*100.* must be multiples of 16"):
        parse(given).check_against(replace(shape, intermediate=100), None)
    parse(given).check_against(replace(shape, intermediate=48), None)
    given["decode"]["tensor_parallel"] = 2
    with pytest.raises(ConfigError, match=r"model.quantisation: a rank's widths .*24.* multiples of 16"):
        parse(given).check_against(replace(shape, intermediate=48), None)


def test_a_hybrid_of_odd_widths_cannot_be_quantised() -> None:
    """The convolution has 2 · 2 · 17 channels of q and k, and 2 · 32 of v."""
    given = content("prefill", device="cuda") | {"decode": {"device": "cuda", "page_selection": "full"}}
    given["model"] |= {"quantisation": "fp8"}
    assert HYBRID.linear is not None
    odd = replace(HYBRID.linear, key_heads=2, value_heads=2, key_dim=17, value_dim=32)
    with pytest.raises(ConfigError, match=r"model.quantisation: .*64, 132\) must be multiples of 16"):
        parse(given).check_against(replace(HYBRID, linear=odd), None)


@pytest.mark.parametrize(("part", "taken"), [("prefill", (16, 32, 64, 128, 256)), ("decode", (64, 128, 256))])
def test_error_names_head_sizes_without_gpu_kernels(part: str, taken: tuple[int, ...]) -> None:
    for dim in (16, 32, 64, 80, 96, 128, 256):
        model = replace(SHAPES["8b"], head_dim=dim)
        parse(content()).check_against(model, None)
        if dim in taken:
            parse(content(part, device="cuda")).check_against(model, None)
        else:
            with pytest.raises(ConfigError, match=rf"^{part}\.device: a GPU takes heads of .* have {dim}$"):
                parse(content(part, device="cuda")).check_against(model, None)


def test_window_layers_cannot_be_delta_layers() -> None:
    model = replace(SHAPES["8b"], sliding_window=1024, window_layers=(3, 4))
    parse(content("decode", delta_layers=[5])).check_against(model, None)
    with pytest.raises(ConfigError, match=r"^decode\.delta_layers names \[4\], which attend to a window"):
        parse(content("decode", delta_layers=[2, 4])).check_against(model, None)


HYBRID = ENGINE_SHAPES["next-16"]


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        (
            "decode",
            {"recompute_blocks": 8},
            "decode.recompute_blocks = 8: must be 0: .* recomputes no blocks",
        ),
        ("decode", {"host_cache_gib": 0.05}, r"decode.host_cache_gib = 0.05: must be 0, or at least 0.\d+"),
        ("decode", {"state_slots": 3}, "decode.state_slots = 3: must be at least 4"),
        ("decode", {"delta_layers": [3, 4]}, r"decode.delta_layers names \[4\], which have linear attention"),
        ("decode", {"tensor_parallel": 4}, "decode.tensor_parallel: 4 ranks cannot share the model's 2 key"),
        ("prefill", {"stages": 16}, "prefill.stages = 16: a stage would have linear attention alone"),
    ],
)
def test_names_what_a_hybrid_does_not_go_with(section: str, values: dict[str, Any], says: str) -> None:
    base = content() | {"prefill": {"device": "cuda"}, "decode": {"device": "cuda", "page_selection": "full"}}
    parse(base | {"model": base["model"] | {"quantisation": "fp8"}}).check_against(HYBRID, None)
    with pytest.raises(ConfigError, match=says):
        parse(base | {section: {**base.get(section, {}), **values}}).check_against(HYBRID, None)


def test_hybrid_recomputes_no_blocks_by_default() -> None:
    settings = parse(content())
    assert (settings.recompute_blocks_of(SHAPES["8b"]), settings.recompute_blocks_of(HYBRID)) == (32, 0)


ROLLING = replace(SHAPES["8b"], sliding_window=1024, window_layers=(0, 1, 2, 4, 5, 6), rolling_buffer=True)


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("decode", {"recompute_blocks": 8}, "must be 0: a model with rolling buffers recomputes no blocks"),
        ("decode", {"state_slots": 3}, "decode.state_slots = 3: must be at least 4"),
        ("prefill", {"stages": 16}, "prefill.stages = 16: a stage would have rolling buffers alone"),
    ],
)
def test_names_what_rolling_buffers_do_not_go_with(section: str, values: dict[str, Any], says: str) -> None:
    base = content() | {"prefill": {"device": "cuda"}, "decode": {"device": "cuda", "page_selection": "full"}}
    parse(base | {"model": base["model"] | {"quantisation": "fp8"}}).check_against(ROLLING, None)
    with pytest.raises(ConfigError, match=says):
        parse(base | {section: {**base.get(section, {}), **values}}).check_against(ROLLING, None)


def test_serve_accepts_the_application_builder(model: Path) -> None:
    """Runs in its own process, because it imports Serve. The weights file is empty, so building fails."""
    code = (
        "from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call\n"
        "from deltafront.service.app import build\n"
        f"call(build, {{'model': {{'path': {str(model)!r}}}, 'decode': {{'page_selection': 'full'}}}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1, (done, [*model.iterdir()])
    assert "ModelError" in done.stderr
    assert "model.safetensors cannot be read" in done.stderr


def test_settings_that_change_kv_change_the_configuration_fingerprint() -> None:
    model, handoff = ModelSpec(path="m"), HandoffConfig()
    same = pairing(model, handoff, None, 1)
    assert pairing(replace(model, profile="p"), replace(handoff, ack_timeout_s=1.0), None, 8) == same
    changes: list[dict[str, Any]] = [{"path": "n"}, {"rope_theta": 9.0}, {"dtype": "float32"}]
    found = {pairing(replace(model, **one), handoff, None, 1) for one in changes}
    found.add(pairing(model, replace(handoff, transport="cuda_ipc"), None, 1))
    found.add(in_8_bits := pairing(model, handoff, "int8", 1))
    assert len(found) == 5 and same not in found
    nixl = replace(handoff, transport="nixl")
    assert pairing(model, nixl, None, 2) != pairing(model, nixl, None, 4), "a stage gathers by ranks"
    for kv_dtype, wanted in ((None, same), ("int8", in_8_bits)):
        content = {"model": {"path": "m"}, "decode": {"page_selection": "full", "kv_dtype": kv_dtype}}
        served = parse(parse(content).model_dump(mode="json"))
        found_there = pairing(served.model, served.handoff, served.decode.kv_dtype, 1)
        assert found_there == wanted, "a door's is that of its workers"
