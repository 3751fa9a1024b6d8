"""Tests writing and reading a profile's file, and the errors of invalid files."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.workers.model.calibrated.profile import (
    DecodePages,
    Level,
    MethodLevels,
    Profile,
    ProfiledModel,
    ProfiledText,
    ProfileError,
    load_profile,
)
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.settings import ModelSpec

from ...profiles import make_profile, write_profile
from ...tiny_model import HEADS, LAYERS, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("profiled"))


digests = st.text("0123456789abcdef", min_size=64, max_size=64)
counts = st.integers(1, 1 << 40)
shares = st.floats(0, 1)
levels = st.builds(
    Level,
    density=st.floats(0, 1, exclude_min=True),
    tokens=counts,
    amounts=st.lists(st.lists(shares, max_size=3).map(tuple), max_size=3).map(tuple),
)
unique_levels = st.lists(levels, min_size=1, max_size=3, unique_by=lambda one: (one.density, one.tokens))
methods = st.builds(
    MethodLevels,
    method=st.text(max_size=5),
    options=st.dictionaries(st.text(max_size=5), st.integers() | shares, max_size=2),
    levels=unique_levels.map(tuple),
)
pages = st.builds(
    DecodePages,
    full_layers=st.just((0, 1)),
    delta_layers=st.lists(st.integers(2, 99), min_size=1, max_size=4).map(tuple),
    page_budget=st.integers(8, 999),
    recency=st.integers(1, 8),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=8) | shares,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
profiles = st.builds(
    Profile,
    format=st.just(1),
    model=st.builds(ProfiledModel, name=st.text(max_size=8), digest=digests),
    texts=st.lists(st.builds(ProfiledText, sha256=digests, tokens=counts), max_size=2).map(tuple),
    prefill=st.lists(methods, max_size=2, unique_by=lambda one: one.method).map(tuple),
    decode=st.none() | pages,
    figures=st.dictionaries(st.text(max_size=5), anything, max_size=3),
)


@given(profile=profiles)
def test_reads_back_a_written_profile(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.json"
    profile.write(path)
    assert Profile.read(path) == profile


def test_profile_file_has_each_row_of_numbers_on_one_line(model: Path, tmp_path: Path) -> None:
    figures = {"a table": [[0.5, -1e-9], [1, 2]], "not numbers": "[1,\n  2]"}
    path = write_profile(model, tmp_path / "profile.json", figures=figures)
    assert Profile.read(path).figures == figures
    lines = [line for line in path.read_text().splitlines() if line.strip().startswith("[ 0.")]
    assert len(lines) == 4 * LAYERS + 1
    assert all(line.count(",") in (HEADS - 1, HEADS, 1, 2) for line in lines)


Change = Callable[[dict[str, Any]], object]


def first_level(content: dict[str, Any]) -> dict[str, Any]:
    level: dict[str, Any] = content["prefill"][0]["levels"][0]
    return level


WRONG: list[tuple[str, Change]] = [
    ("format = 2: must be 1", lambda c: c.update(format=2)),
    ("key 'format' is missing", lambda c: c.pop("format")),
    ("unknown key 'modle'", lambda c: c.update(modle={})),
    ("model = []: must be", lambda c: c.update(model=[])),
    ("model.digest = 'abc': String should match", lambda c: c["model"].update(digest="abc")),
    ("texts[0].tokens = 0: must be greater", lambda c: c["texts"][0].update(tokens=0)),
    ("texts[0].tokens = 9.5: must be a valid integer", lambda c: c["texts"][0].update(tokens=9.5)),
    ("prefill[0].levels = []: Tuple should have at least 1", lambda c: c["prefill"][0].update(levels=[])),
    ("unknown key 'prefill[0].levels[0].tau'", lambda c: first_level(c).update(tau=0.9)),
    ("prefill[0].levels[0].density = 0: must be greater than 0", lambda c: first_level(c).update(density=0)),
    (
        "prefill[0].levels[0].amounts[3][2] = 1.5: must be less than or equal to 1",
        lambda c: first_level(c)["amounts"][3].__setitem__(2, 1.5),
    ),
    (
        "prefill[0].levels[0].amounts[1][0] = nan: must be",
        lambda c: first_level(c)["amounts"][1].__setitem__(0, float("nan")),
    ),
    (
        "prefill[0].levels[0].amounts[0][1] = '0.5': must be a valid number",
        lambda c: first_level(c)["amounts"][0].__setitem__(1, "0.5"),
    ),
    (
        "prefill[0].levels[3]: density 0.2 at 256 tokens is there already",
        lambda c: c["prefill"][0]["levels"].append(first_level(c)),
    ),
    (
        "prefill[2]: xattention with these options is there already",
        lambda c: c["prefill"].append(c["prefill"][0]),
    ),
    ("decode.full_layers and delta_layers share [0]", lambda c: c["decode"].update(delta_layers=[0, 3])),
    ("decode.delta_layers = []: Tuple", lambda c: c["decode"].update(delta_layers=[])),
    ("decode.recency: 33 exceeds page_budget", lambda c: c["decode"].update(recency=33)),
]


@pytest.mark.parametrize(("says", "change"), WRONG, ids=[says for says, _ in WRONG])
def test_error_names_invalid_profile_values(model: Path, tmp_path: Path, says: str, change: Change) -> None:
    content = make_profile(model).model_dump(mode="json", by_alias=True)
    change(content)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError) as caught:
        Profile.read(path)
    assert str(caught.value).startswith(f"{path}: {says}")
    assert "\n" not in str(caught.value)


def test_refuses_files_that_are_not_a_profile(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ProfileError, match=r"profile\.json cannot be read: No such file"):
        Profile.read(path)
    with pytest.raises(ProfileError, match=r"nowhere/profile\.json cannot be written: No such file"):
        make_profile(model).write(tmp_path / "nowhere" / "profile.json")
    for text, says in (("{", "Invalid JSON"), ("[]", "must be an object"), ("\xff", "Invalid JSON")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ProfileError, match=rf"profile\.json: .*{says}"):
            Profile.read(path)


def test_a_full_disk_does_not_damage_the_old_profile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "profile.json", Path.write_text
    make_profile(model).write(path)
    before = path.read_bytes()

    def half(self: Path, text: str, **how: Any) -> None:
        write(self, text[: len(text) // 2], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ProfileError, match="No space left"):
        make_profile(model).write(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


MISFITS: list[tuple[str, Change]] = [
    ("model.digest: it was made for tiny, ", lambda c: c["model"].update(digest="0" * 64)),
    (
        "prefill[0].levels[1].amounts[3]: 3 numbers for 4 query heads",
        lambda c: c["prefill"][0]["levels"][1]["amounts"][3].pop(),
    ),
    (
        "prefill[0].levels[0].amounts: 4 rows for 5 layers",
        lambda c: first_level(c)["amounts"].pop(),
    ),
    ("decode.delta_layers: layer 5 of a model with 5", lambda c: c["decode"].update(delta_layers=[1, 5])),
    ("decode.full_layers: layer 7 of a model with 5", lambda c: c["decode"].update(full_layers=[7])),
    ("prefill[1].method = 'dpax': no method that ranks", lambda c: c["prefill"][1].update(method="dpax")),
    ("prefill[1].method = 'dense': no method that ranks", lambda c: c["prefill"][1].update(method="dense")),
    ("prefill[1].method = 'dpxa+delta': no method", lambda c: c["prefill"][1].update(method="dpxa+delta")),
    (
        "prefill[1].options.tau: no option that shapes scores; these do: ",
        lambda c: c["prefill"][1]["options"].update(tau=0.9),
    ),
    (
        "prefill[1].options: lacks cos, window",
        lambda c: [c["prefill"][1]["options"].pop(k) for k in ("window", "cos")],
    ),
    ("prefill[1].options.cos = 'x': must be a number", lambda c: c["prefill"][1]["options"].update(cos="x")),
    (
        "prefill[1].options.k_anchors: method_options.k_anchors = 9 is",
        lambda c: c["prefill"][1]["options"].update(k_anchors=9),
    ),
]


@pytest.mark.parametrize(("says", "change"), MISFITS, ids=[says for says, _ in MISFITS])
def test_error_names_profile_values_that_do_not_fit_the_model(
    model: Path, tmp_path: Path, says: str, change: Change
) -> None:
    content = make_profile(model).model_dump(mode="json", by_alias=True)
    change(content)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    profile = Profile.read(path)
    with pytest.raises(ProfileError) as caught:
        profile.check(read_config(model), model_digest(ModelSpec(path=str(model))))
    assert str(caught.value).startswith(says)
    with pytest.raises(ProfileError) as caught:
        load_profile(ModelSpec(path=str(model), profile=str(path)))
    assert str(caught.value).startswith(f"model.profile: {path}: {says}")


def test_loads_a_profile_only_for_its_own_model(model: Path, tmp_path: Path) -> None:
    path = write_profile(model, tmp_path / "profile.json")
    own = ModelSpec(path=str(model), dtype="float16", profile=str(path))
    assert load_profile(own) == make_profile(model)
    assert load_profile(ModelSpec(path=str(model))) is None
    with pytest.raises(ProfileError, match=rf"model\.profile: {path}: model\.digest: .* calibrate it"):
        load_profile(replace(own, rope_theta=2e4))
    with pytest.raises(ModelError, match=r"model\.profile: no profile at 'nowhere\.json'"):
        load_profile(ModelSpec(path=str(model), profile="nowhere.json"))
