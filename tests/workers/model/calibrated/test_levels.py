"""Tests which level of a profile a method gets, and which densities are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.kernels.methods import MethodError, method_spec
from deltafront.workers.model.calibrated.levels import nearest, thresholds_for
from deltafront.workers.model.calibrated.profile import Level, shaping_options

from ...profiles import make_profile
from ...tiny_model import LAYERS, make_tiny_model

counts = st.integers(1, 1 << 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("profiled"))


def test_level_is_keyed_by_the_options_that_change_tile_scores() -> None:
    spec = method_spec("dpxa+delta", {"tau": 0.3, "density": 0.08, "cos": 0.5, "gamma": 32})
    assert shaping_options(spec).keys() == {
        "cos", "centred", "q_anchors", "k_anchors", "sink", "window",
    }  # fmt: skip
    assert shaping_options(spec)["cos"] == 0.5


@pytest.mark.parametrize("name", ["xattention", "xattention+delta"])
def test_uses_the_level_with_the_nearest_prompt_length(model: Path, name: str) -> None:
    profile = make_profile(model)
    short, long, other = profile.prefill[0].levels
    spec = method_spec(name, {"density": 0.2, "tau": 0.123, "min_tokens": 7})
    thresholds = thresholds_for(profile, spec)
    assert thresholds is not None
    for tokens, level in ((1, short), (256, short), (512, short), (513, long), (1 << 20, long)):
        assert [tuple(thresholds(layer, tokens)) for layer in range(LAYERS)] == list(level.thresholds)
    wider = thresholds_for(profile, method_spec(name, {"density": 0.5}))
    assert wider is not None and tuple(wider(2, 16)) == pytest.approx(other.thresholds[2])


def test_interpolates_thresholds_between_two_densities(model: Path) -> None:
    profile = make_profile(model)
    short, long, other = profile.prefill[0].levels
    assert (short.density, long.density, other.density) == (0.2, 0.2, 0.5)
    for asked, share in ((0.2, 0.0), (0.26, 0.2), (0.35, 0.5), (0.5, 1.0)):
        thresholds = thresholds_for(profile, method_spec("xattention", {"density": asked}))
        assert thresholds is not None
        for tokens, level in ((1, short), (1 << 20, long)):
            for layer in range(LAYERS):
                ends = zip(level.thresholds[layer], other.thresholds[layer], strict=True)
                want = [(1 - share) * low + share * high for low, high in ends]
                assert thresholds(layer, tokens) == pytest.approx(want)


@given(lengths=st.lists(counts, min_size=1, max_size=5, unique=True), tokens=counts)
def test_nearest_calibrated_length_has_the_smallest_length_ratio(lengths: list[int], tokens: int) -> None:
    found = nearest([Level(density=1, tokens=one, share=1, amounts=()) for one in lengths], tokens).tokens
    assert found in lengths
    ratio = max(found, tokens) / min(found, tokens)
    assert all(ratio <= max(one, tokens) / min(one, tokens) * (1 + 1e-9) for one in lengths)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "xattention",
            {"density": 0.1},
            "0.2 to 0.5 for xattention with sink=1, window=1, stride=8; "
            "0.3 for dpxa with sink=1, window=128, cos=0.4",
        ),
        ("xattention", {"density": 0.6}, "0.2 to 0.5 for xattention"),
        ("xattention", {"density": 0.2, "window": 2}, "0.2 to 0.5 for xattention with sink=1, window=1"),
        (
            "xattention+delta",
            {"density": 0.2, "stride": 4},
            "the model's profile has 0.2 to 0.5 for xattention",
        ),
    ],
)
def test_refuses_a_level_that_the_profile_lacks(
    model: Path, name: str, options: dict[str, float], says: str
) -> None:
    with pytest.raises(MethodError) as caught:
        thresholds_for(make_profile(model), method_spec(name, options))
    assert caught.value.field == "method_options.density"
    assert str(caught.value).startswith(f"method_options.density = {options['density']}: ")
    assert says in str(caught.value)


def test_refuses_a_density_without_a_profile(model: Path) -> None:
    for profile in (None, make_profile(model), make_profile(model, prefill=())):
        for name in ("dense", "dpxa", "streaming+delta"):
            assert thresholds_for(profile, method_spec(name)) is None
    with pytest.raises(MethodError, match=r"density = 0.2: the model has no profile \(model.profile\)"):
        thresholds_for(None, method_spec("dpxa", {"density": 0.2}))
    with pytest.raises(MethodError, match="the model's profile has no levels"):
        thresholds_for(make_profile(model, prefill=()), method_spec("dpxa", {"density": 0.2}))
