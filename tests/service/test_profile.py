"""`model.profile` in a service: the values that it sets, the requests that it refuses, and `info`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deltafront.kernels.methods import MethodSpec
from deltafront.service.cli.main import app
from deltafront.service.cli.serve import read_settings
from deltafront.service.client import DeltafrontClient, PrefillFinished
from deltafront.service.config import ConfigError, ServiceConfig, load, parse
from deltafront.service.errors import InvalidArgument
from deltafront.service.wiring import check_start
from deltafront.workers.model.calibrated.profile import Measured
from deltafront.workers.model.directory import store
from deltafront.workers.settings import DecodeConfig

from ..workers.profiles import write_profile
from ..workers.tiny_model import write_weights
from .inprocess import House, settings, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model with weights, so that its digest differs from other models'."""
    directory = write_model(tmp_path / "model")
    write_weights(directory)
    return directory


@pytest.fixture
def profile(model: Path, tmp_path: Path) -> Path:
    return write_profile(model, tmp_path / "profile.json")


def write_config(folder: Path, model: Path, /, **sections: Any) -> Path:
    path = folder / "service.yaml"
    content: dict[str, Any] = {"model": {"path": str(model), "profile": "profile.json"}}
    path.write_text(yaml.safe_dump(content | sections))
    return path


def test_profile_sets_decode_keys_that_are_not_given(model: Path, profile: Path, tmp_path: Path) -> None:
    """Without the profile, a configuration that names no Δ-layers is refused."""
    config = load(write_config(tmp_path, model))
    assert config.decode == DecodeConfig(full_layers=(0,), delta_layers=(1, 3), page_budget=32, recency=4)
    assert config.model.profile == str(profile), "beside its configuration"
    assert parse(config.model_dump(mode="json")) == config, "it must survive the way through Serve"
    own = load(write_config(tmp_path, model, decode={"delta_layers": [2], "page_budget": 64}))
    assert own.decode == DecodeConfig(full_layers=(0,), delta_layers=(2,), page_budget=64, recency=4)
    check_start(config)
    check_start(own)
    write_profile(model, profile, decode=None)
    with pytest.raises(ConfigError, match=r"decode\.delta_layers: empty"):
        load(write_config(tmp_path, model))


def test_relative_profile_path_is_found_in_the_project(
    model: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree" / "deploy").mkdir(parents=True)
    monkeypatch.setattr(store, "_TREE", tmp_path / "tree")
    shipped = profile.rename(tmp_path / "tree" / "deploy" / "profile.json")
    config = parse({"model": {"path": str(model), "profile": "deploy/profile.json"}})
    assert config.model.profile == str(shipped)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), r"model\.profile: no profile at 'profile\.json': `deltafront calibrate"),
        (lambda path: path.write_text("{"), r"model\.profile: .*profile\.json: Invalid JSON"),
        (
            lambda path: path.write_text(path.read_text().replace('"recency": 4', '"recency": 40')),
            r"model\.profile: .*profile\.json: decode\.recency: 40 exceeds page_budget",
        ),
    ],
)
def test_a_profile_that_cannot_be_read_stops_the_start(
    model: Path, profile: Path, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(profile)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/service\.yaml: {says}"):
        load(write_config(tmp_path, model))


def test_names_a_malformed_section_before_reading_the_profile(model: Path, tmp_path: Path) -> None:
    for sections, key in (({"model": 3}, "model"), ({"decode": [1]}, "decode")):
        with pytest.raises(ConfigError, match=f"{key} = .*must be a section"):
            load(write_config(tmp_path, model, **sections))
    with pytest.raises(ConfigError, match=r"model\.profile = 3: must be a valid string"):
        parse({"model": {"path": "m", "profile": 3}, "decode": {"page_selection": "full"}})


def test_another_models_profile_stops_the_start(model: Path, profile: Path, tmp_path: Path) -> None:
    config = load(write_config(tmp_path, model))
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(64)}, model / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.profile: .*profile\.json: model\.digest: it was made for tiny"
    ):
        check_start(config)


def with_options(**options: float) -> dict[str, Any]:
    return {"method_options": {"xattention": options}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"prefill": with_options(density=0.6)},
            "prefill.method_options.xattention: method_options.density = 0.6: the model's profile has",
        ),
        (
            {"prefill": with_options(density=0.2, window=300)},
            "prefill.method_options.xattention: method_options.density = 0.2: the model's profile has",
        ),
    ],
)
def test_start_refuses_a_density_outside_the_profile(
    model: Path, profile: Path, tmp_path: Path, sections: dict[str, Any], says: str
) -> None:
    config = load(write_config(tmp_path, model, **sections))
    with pytest.raises(ConfigError) as caught:
        check_start(config)
    assert says in str(caught.value)


def test_start_refuses_a_default_method_without_its_level(
    model: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"door": {"default_method": "xattention+delta"}, "prefill": with_options(density=0.2)}
    check_start(load(write_config(tmp_path, model, **sections)))
    without = {"model": {"path": str(model)}, "decode": {"page_selection": "full"}, **sections}
    with pytest.raises(ConfigError) as caught:
        check_start(parse(without))
    says = "method_options.density = 0.2: the model has no profile (model.profile)"
    assert f"door.default_method: {says}" in str(caught.value)
    assert f"prefill.method_options.xattention: {says}" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dpax": {}}, "prefill.method_options.dpax: unknown attention method 'dpax'"),
        ({"dpxa": {"tau": 2}}, "prefill.method_options.dpxa: method_options.tau = 2.0 is outside"),
        ({"dpxa": {"tua": 1}}, "prefill.method_options.dpxa: dpxa has no option 'tua'"),
        ({"flex": {}}, "prefill.method_options.flex: flex reads whole prompts only"),
        ({"dpxa+delta": {}}, "prefill.method_options.dpxa+delta: name the method"),
        ({"dpxa": {"tau": "x"}}, "prefill.method_options.dpxa.tau = 'x': must be a valid number"),
    ],
)
def test_defaults_of_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(
            {
                "model": {"path": "m"},
                "prefill": {"method_options": options},
                "decode": {"page_selection": "full"},
            }
        )
    assert says in str(caught.value)


def served(model: Path, profile: Path, **options: float) -> ServiceConfig:
    """Start a door with short renewals and a model with a profile."""
    content = settings(model, default_method="xattention").model_dump(mode="json")
    content["model"]["profile"] = str(profile)
    content["prefill"]["method_options"] = {"xattention": options}
    del content["decode"]["full_layers"], content["decode"]["page_budget"]
    content["decode"] |= {"delta_layers": [2], "recency": 3}
    return parse(content)


Make = Callable[..., House]


def read_by(house: House, **asked: Any) -> MethodSpec:
    """Return the method with which the prefill group was asked to prefill a prompt."""
    with DeltafrontClient(house.address) as client:
        done = [event for event in client.prefill("x" * 40, **asked) if isinstance(event, PrefillFinished)]
        client.release(done[0].session.session_id)
    return house.group.jobs[-1].method


def test_request_may_choose_a_calibrated_density(make_house: Make, model: Path, profile: Path) -> None:
    house = make_house(served(model, profile))
    spec = read_by(house, method="xattention+delta", options={"density": 0.5})
    assert (spec.name, spec.values["density"]) == ("xattention+delta", 0.5)
    assert read_by(house).values["density"] == 0.0
    with pytest.raises(
        InvalidArgument, match=r"attention\.options\.density: .*has 0\.2 to 0\.5 for xattention with"
    ):
        read_by(house, options={"density": 0.1})
    with pytest.raises(InvalidArgument, match=r"density = 0\.3: the model's profile has"):
        read_by(house, method="dpxa", options={"density": 0.3})
    assert read_by(house, method="dpxa", options={"density": 0.3, "window": 128}).name == "dpxa"
    assert len(house.group.jobs) == 3


def test_configured_method_defaults_apply_to_requests(make_house: Make, model: Path, profile: Path) -> None:
    house = make_house(served(model, profile, density=0.2, min_tokens=99))
    for asked in ({}, {"method": "xattention"}, {"method": "xattention+delta"}):
        values = read_by(house, **asked).values
        assert (values["density"], values["min_tokens"], values["sink"]) == (0.2, 99, 1)
    assert read_by(house, options={"density": 0.5}).values["min_tokens"] == 99
    assert read_by(house, options={"density": 0, "tau": 0.6}).values["tau"] == 0.6
    assert read_by(house, method="dpxa", options={"tau": 0.6}).values["density"] == 0.0
    for option in ("tau", "outside"):
        says = rf"attention\.options\.{option}: counts for nothing at density = 0\.2: give density = 0 too"
        with pytest.raises(InvalidArgument, match=says):
            read_by(house, options={option: 1})
    with pytest.raises(InvalidArgument, match=r"options\.tau: counts for nothing at share = 0\.5: give"):
        read_by(house, method="dpxa", options={"share": 0.5, "tau": 0.6})
    with DeltafrontClient(house.address) as client:
        shown = {method.name: method.defaults for method in client.info().methods}
    assert (shown["xattention"]["density"], shown["dpxa"]["density"]) == (0.2, 0.0)


def test_refuses_a_density_without_a_profile(make_house: Make) -> None:
    with pytest.raises(InvalidArgument, match=r"attention\.options\.density: .*the model has no profile"):
        read_by(make_house(), method="dpxa", options={"density": 0.08})


def test_info_shows_the_profile_and_effective_settings(make_house: Make, model: Path, profile: Path) -> None:
    house = make_house(served(model, profile))
    with DeltafrontClient(house.address) as client:
        info = client.info()
    assert (info.full_layers, info.delta_layers, info.page_budget, info.recency) == ([0], [2], 32, 3)
    assert info.profile is not None and info.profile.model == "tiny"
    assert json.loads(info.profile.figures) == {"kl": 0.05, "held out": ["a", 3]}
    levels = [(one.method, one.density, one.tokens) for one in info.profile.levels]
    assert levels == [
        ("xattention", 0.2, 256),
        ("xattention", 0.2, 1024),
        ("xattention", 0.5, 1024),
        ("dpxa", 0.3, 512),
    ]
    assert info.profile.levels[3].options["cos"] == 0.4
    shown = CliRunner().invoke(app, ["info", "--address", house.address], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    for text in (
        "Profile of tiny",
        "Δ-layers 2; dense 0; 32 pages, including the last 3",
        "held out",
        "a, 3",
        "1024",
    ):
        assert text in shown.output
    raw = json.loads(CliRunner().invoke(app, ["info", "--address", house.address, "--json"]).output)
    assert raw["profile"]["levels"][0]["options"] == {"sink": 1, "window": 1, "stride": 8}


def test_profiles_measured_setting_is_the_default_method(
    make_house: Make, model: Path, tmp_path: Path
) -> None:
    measured = Measured(
        method="xattention+delta",
        options={"share": 0.25, "gamma": 32},
        recompute_blocks=5,
        tokens=(6000,),
        samples=120,
        density=0.3,
        dense=0.8,
        score=0.79,
        kept=0.9875,
        low=0.975,
        high=1.0,
        lost=2,
        won=1,
        verdict="xattention+delta keeps 0.9875 [of dense]",
    )
    path = write_profile(model, tmp_path / "measured.json", measured=measured)
    content = settings(model, default_method="").model_dump(mode="json")
    content["model"]["profile"], content["decode"]["recompute_blocks"] = str(path), None
    house = make_house(parse(content))
    spec = read_by(house)
    assert (spec.name, spec.values["share"], spec.values["gamma"]) == ("xattention+delta", 0.25, 32)
    assert read_by(house, options={"tau": 0.7}).values["share"] == 0.0
    assert read_by(house, method="dpxa").values["share"] == 0.0
    with DeltafrontClient(house.address) as client:
        info = client.info()
    assert (info.default_method, info.recompute_blocks) == ("xattention+delta", 5)
    assert info.default_options == {"share": 0.25, "gamma": 32} and info.measured is not None
    assert (info.measured.setting, info.measured.kept) == (measured.setting, 0.9875)
    assert (info.measured.tokens, info.measured.lost) == ([6000], 2)
    shown = CliRunner().invoke(app, ["info", "--address", house.address], env={"COLUMNS": "160"})
    assert "Measured: xattention+delta keeps 0.9875 [of dense]" in shown.output
    series = f'deltafront_profile_score_ratio{{setting="{measured.setting}"}} 0.9875'
    assert series in house.metrics.expose().decode()


def test_options_without_a_default_method_stop_the_start() -> None:
    content = {"model": {"path": "m"}, "decode": {"page_selection": "full"}}
    with pytest.raises(ConfigError, match=r"door\.default_options: are of door\.default_method, which"):
        parse({**content, "door": {"default_options": {"share": 0.2}}})
    with pytest.raises(ConfigError, match=r"door\.default_options: .*no option 'tua'"):
        parse({**content, "door": {"default_method": "dpxa", "default_options": {"tua": 1}}})


def test_info_shows_no_profile_if_none_is_served(make_house: Make) -> None:
    shown = CliRunner().invoke(app, ["info", "--address", make_house().address], env={"COLUMNS": "160"})
    assert "full: no Δ-layers" in shown.output and "Profile" not in shown.output


def test_model_option_ignores_the_configured_profile(model: Path, profile: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, prefill=with_options(density=0.2))
    other = read_settings(config, str(write_model(tmp_path / "other")), None)
    assert (other.model.profile, other.prefill.method_options) == (None, {})
    assert other.decode.delta_layers == ()
