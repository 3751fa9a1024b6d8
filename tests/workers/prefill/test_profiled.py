"""Tests that a stage gives a request's method the profile's thresholds, by layer, head and prompt length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from deltafront.kernels.methods import MethodError, MethodSpec, method_spec
from deltafront.tests.workers.in_process import run_in_process
from deltafront.workers.messages.requests import PrefillFailed
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import ProfileError
from deltafront.workers.settings import ModelSpec, PrefillConfig

from ..profiles import make_profile, write_profile
from ..tiny_model import HEADS, LAYERS, make_tiny_model, random_ids, whole_prompt


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("profiled"))


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelSpec:
    return ModelSpec(
        path=str(directory),
        dtype="float32",
        profile=str(write_profile(directory, directory / "profile.json")),
    )


def config(
    stages: int, chunk: int, **changes: Mapping[str, Mapping[str, float]] | tuple[str, ...]
) -> PrefillConfig:
    return PrefillConfig(stages=stages, chunk_tokens=chunk, cache_tokens=2048, **changes)  # type: ignore[arg-type]


def at_density(name: str, density: float) -> MethodSpec:
    window = 128 if name.startswith("dpxa") else 1
    return method_spec(name, {"density": density, "window": window, "min_tokens": 0})


@pytest.mark.parametrize(("stages", "chunk"), [(1, 1024), (2, 256), (3, 128)])
@pytest.mark.parametrize(
    ("name", "density", "tokens"),
    [("xattention", 0.2, 500), ("xattention", 0.2, 900), ("xattention+delta", 0.5, 900), ("dpxa", 0.3, 900)],
)
def test_calibrated_thresholds_do_not_depend_on_chunk_sizes(
    directory: Path, model: ModelSpec, name: str, density: float, tokens: int, stages: int, chunk: int
) -> None:
    spec, ids = at_density(name, density), random_ids(tokens)
    report, logits_V = run_in_process(model, config(stages, chunk), ids, spec)
    profile = make_profile(directory)
    wanted_V, _ = whole_prompt(directory, ids, spec, thresholds_for(profile, spec))
    np.testing.assert_allclose(logits_V, wanted_V.numpy(), rtol=2e-3, atol=2e-3)
    assert sum(layer.computed for layer in report.density) != sum(layer.causal for layer in report.density)


def test_thresholds_depend_on_the_whole_prompts_length(directory: Path, model: ModelSpec) -> None:
    """All thresholds of a level are equal: 0 for short prompts, 1 for long ones."""
    content = make_profile(directory).model_dump(by_alias=True)
    for level, threshold in zip(content["prefill"][0]["levels"], (0.0, 1.0, 0.5), strict=True):
        level["amounts"] = ((threshold,) * HEADS,) * LAYERS
    path = write_profile(directory, directory / "even.json", prefill=content["prefill"])
    even = ModelSpec(path=model.path, dtype="float32", profile=str(path))
    density = []
    for tokens in (512, 640):
        report, _ = run_in_process(even, config(2, 256), random_ids(tokens), at_density("xattention", 0.2))
        density.append({layer.computed / layer.causal for layer in report.density[:-1]})
    assert density == [{7 / 10}, {1.0}], "sink and diagonal of four blocks; everything"


def test_uncalibrated_density_fails_only_its_request(directory: Path, model: ModelSpec) -> None:
    ids, spec = random_ids(300), at_density("xattention", 0.6)
    with pytest.raises(
        PrefillFailed, match=r"xattention cannot start: method_options.density = 0.6: the model's"
    ):
        run_in_process(model, config(2, 256), ids, spec)
    with pytest.raises(PrefillFailed, match=r"method_options.density = 0.2: the model has no profile"):
        run_in_process(str(directory), config(2, 256), ids, at_density("xattention", 0.2))


def test_stage_refuses_to_start_with_another_models_profile(model: ModelSpec) -> None:
    other = ModelSpec(path=model.path, dtype="float32", profile=model.profile, rope_theta=5e5)
    with pytest.raises(
        ProfileError, match=r"model\.profile: .*profile\.json: model\.digest: it was made for tiny"
    ):
        run_in_process(other, config(1, 256), random_ids(300), method_spec("dense"))


def test_stage_warms_up_with_the_configured_method_options(directory: Path, model: ModelSpec) -> None:
    ids, spec = random_ids(600), at_density("xattention", 0.2)
    defaults = {"xattention": {"density": 0.2, "window": 1, "min_tokens": 0}}
    warm = config(2, 128, method_options=defaults, warm_up=("xattention", "xattention+delta"))
    assert warm.method("xattention") == spec
    warmed, cold = (run_in_process(model, one, ids, spec)[1] for one in (warm, config(2, 128)))
    assert (warmed == cold).all()
    with pytest.raises(MethodError, match=r"method_options.density = 0.2: the model has no profile"):
        run_in_process(ModelSpec(path=str(directory), dtype="float32"), warm, ids, spec)
