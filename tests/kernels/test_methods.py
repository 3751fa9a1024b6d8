"""Tests the registry of attention methods, also with methods from outside the package and without torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from deltafront.kernels import methods
from deltafront.kernels.build import build, part_of
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.methods import (
    PRESETS,
    MethodError,
    MethodSpec,
    load,
    method_spec,
    reads_whole_prompts,
    register,
    resume_step,
)
from deltafront.kernels.options import Option, StreamingOptions, option
from deltafront.kernels.selectors.streaming import StreamingSelector
from deltafront.tests.workers.in_process import run_in_process
from deltafront.workers.settings import ModelSpec, PrefillConfig

from ..workers.tiny_model import LAYERS, make_tiny_model, random_ids, whole_prompt

OWN = {
    "delta_kv",
    "delta_xattention",
    "dense",
    "dpxa",
    "streaming",
    "xattention",
}


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module on sys.path outside the package that was not imported yet. The methods that
    it registers are removed after the test."""
    assert set(PRESETS) >= OWN
    name = f"outside_{tmp_path.name.replace('-', '_')}"
    source = Path(__file__).with_name("outside_method.py").read_text()
    (tmp_path / f"{name}.py").write_text(source.replace('register("comb"', f'register("{name}"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(methods._presets):
        yield name


def test_built_in_methods_are_registered_on_import() -> None:
    assert set(PRESETS) >= OWN
    assert list(PRESETS) == sorted(PRESETS)
    assert not any(reads_whole_prompts(name) for name in OWN) and not reads_whole_prompts("dense+delta")
    streaming = PRESETS["streaming"]
    assert streaming.source == "StreamingLLM (Xiao et al. 2023), section 3.2"
    assert list(streaming.options) == ["sink", "window", "min_tokens"]
    assert streaming.options["window"] == Option(
        2048, 1, 1 << 20, "most recent tokens that every query attends to"
    )
    assert PRESETS["dpxa"].options["tau"].default == 0.8


@pytest.mark.parametrize("name", sorted(OWN))
def test_default_options_are_within_bounds_and_build_a_method(name: str) -> None:
    given = {key: option.default for key, option in PRESETS[name].options.items()}
    spec = method_spec(name, given)
    assert spec == method_spec(name) and hash(spec) == hash(method_spec(name))
    assert spec.module.startswith("deltafront.kernels.") and not spec.correction
    build(spec)
    corrected = method_spec(f"{name}+delta", {"gamma": 32})
    assert corrected.correction and corrected.values == {**given, "gamma": 32, "spread": 1.0}
    build(corrected)


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        ("magic", {}, "method", "unknown attention method 'magic'; known: .*delta_kv, "),
        ("dense+gamma", {}, "method", "unknown attention method"),
        ("dense", {"tau": 0.5}, "method_options.tau", "dense has no option 'tau'; it takes: none"),
        (
            "xattention",
            {"gamma": 4},
            "method_options.gamma",
            "it takes: tau, outside, density, share, sink, window, min_tokens, stride",
        ),
        ("xattention", {"stride": 5}, "method_options.stride", r"= 5 is not one of \(4, 8, 16, 64\)"),
        ("xattention", {"stride": 4.5}, "method_options.stride", "is not a whole number"),
        ("dpxa", {"outside": 0.5}, "method_options.outside", "= 0.5 is not a whole number"),
        ("xattention", {"tau": 1.5}, "method_options.tau", "= 1.5 is outside 0.01 .. 1.0"),
        ("xattention", {"tau": float("nan")}, "method_options.tau", "is outside"),
        ("dense+delta", {"gamma": 0}, "method_options.gamma", "= 0 is outside 1 .. 4096"),
        ("dpxa", {"share": 0.1, "density": 0.2}, "method_options", "share = 0.1 and density = 0.2 exclude"),
    ],
)
def test_refuses_unknown_methods_and_options_naming_the_field(
    name: str, options: dict[str, float], field: str, message: str
) -> None:
    with pytest.raises(MethodError, match=message) as caught:
        method_spec(name, options)
    assert caught.value.field == field


def test_converts_option_values_to_the_type_of_their_field() -> None:
    values = method_spec("delta_kv", {"means": 0.0, "critical": 256.0, "cos": 1}).values
    given = {"means": False, "critical": 256, "cos": 1}
    assert values == {**given, "min_tokens": 4096}
    assert type(values["means"]) is bool and type(values["critical"]) is int


def test_a_selector_from_another_package_prefills_a_prompt(outside: str, tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="unknown attention method"):
        method_spec(outside)
    load(outside)
    assert PRESETS[outside].source == "nowhere"
    assert resume_step(method_spec(outside)) == 0, "it does not say that its state follows from the keys"
    with pytest.raises(MethodError, match="is not one of"):
        method_spec(outside, {"step": 3})
    directory, ids = make_tiny_model(tmp_path / "model"), random_ids(900)
    model = ModelSpec(path=str(directory), dtype="float32")
    config = PrefillConfig(stages=2, chunk_tokens=256, cache_tokens=1024)
    seen: list[int] = sys.modules[outside].SEEN_LAYERS
    for step, is_dense in ((1, True), (4, False)):
        spec = method_spec(outside, {"step": step})
        assert spec.module == outside
        seen.clear()
        report, logits_V = run_in_process(model, config, ids, spec)
        assert sorted(seen) == list(range(LAYERS)), "every layer's state is made once, and knows its layer"
        computed = sum(layer.computed for layer in report.density)
        causal = sum(layer.causal for layer in report.density)
        assert (computed == causal) is is_dense
        wanted_V, _ = whole_prompt(directory, ids, spec)
        np.testing.assert_allclose(logits_V, wanted_V.numpy(), rtol=2e-3, atol=2e-3)


def test_another_process_imports_the_module_named_in_a_method_spec(outside: str, tmp_path: Path) -> None:
    """A stage's process gets the spec but no list of modules."""
    load(outside)
    (tmp_path / "spec").write_bytes(pickle.dumps(method_spec(f"{outside}+delta", {"step": 4})))
    code = (
        "import pickle, sys; from pathlib import Path; from deltafront.kernels.build import build; "
        f"sys.path.insert(0, {str(tmp_path)!r}); "
        f"spec = pickle.loads(Path({str(tmp_path / 'spec')!r}).read_bytes()); "
        "assert spec.module not in sys.modules; "
        "assert build(spec).inner.selector.step == 4"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["deltafront.nowhere:Backend", "deltafront.kernels.attention.dense:Nobody"])
def test_reports_a_method_part_that_cannot_be_imported(path: str) -> None:
    with pytest.raises(MethodError, match=f"{path} cannot be imported"):
        part_of(path)
    dense = part_of("deltafront.kernels.attention.dense:DenseBackend")
    assert part_of(dense) is dense and dense.__name__ == "DenseBackend"


def test_refuses_modules_that_register_no_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_outside.py").write_text("raise ValueError('no luck')")
    (tmp_path / "empty_outside.py").write_text("")
    with pytest.raises(MethodError, match="nowhere_at_all cannot be imported for its methods"):
        load("nowhere_at_all")
    with pytest.raises(MethodError, match="no luck"):
        load("broken_outside")
    with pytest.raises(MethodError, match="empty_outside registers no attention method"):
        load("empty_outside")
    with pytest.raises(MethodError, match="empty_outside registers no attention method"):
        build(MethodSpec("thing", "empty_outside", False, ()))
    with pytest.raises(MethodError, match="elsewhere registers no attention method 'dense'"):
        build(MethodSpec("dense", "elsewhere", False, ()))


def test_refuses_invalid_registrations() -> None:
    @dataclass(frozen=True)
    class Unbounded:
        share: float = 0.5

    @dataclass(frozen=True)
    class Mine:
        share: float = option(0.5, 0.0, 1.0, "a share")

    def register_as(name: str, options: type[object]) -> None:
        backend = PRESETS["dense"].backend
        register(name, options, None, backend, source="nowhere")

    with pytest.raises(MethodError, match="has registered a method 'dense'"):
        register_as("dense", Mine)
    with pytest.raises(MethodError, match="cannot be a method's name"):
        register_as("mine+delta", Mine)
    with pytest.raises(TypeError, match=r"Unbounded\.share is not made with `option`"):
        register_as("unbounded", Unbounded)
    with pytest.raises(KernelInputError, match="window"):
        StreamingSelector(StreamingOptions(window=0))


def test_listing_and_checking_methods_does_not_import_torch() -> None:
    code = (
        "import sys; from deltafront.kernels.methods import PRESETS, method_spec; "
        "[method_spec(f'{name}+delta') for name in PRESETS]; "
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"torch or triton was imported {done.stderr}"
