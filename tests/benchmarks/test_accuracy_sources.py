"""Texts of packages' sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltafront.benchmarks.accuracy.sources import LEFT_OUT, PACKAGES, files_of, main


def test_a_text_holds_a_packages_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), "--packages", "packaging", "rich"])
    told = capsys.readouterr().out
    for name in ("packaging", "rich"):
        text = (tmp_path / f"{name}.txt").read_text(encoding="utf-8")
        assert len(text) > 50_000 and "def " in text
        assert f"{name} " in told
    assert not any(LEFT_OUT.search(path.name) for path in files_of("rich"))


def test_read_before_or_missing(tmp_path: Path) -> None:
    assert not {"sympy", "torch"} & {name.lower() for name in PACKAGES} and len(PACKAGES) > 20
    with pytest.raises(SystemExit, match="no-such-package is not installed"):
        main([str(tmp_path), "--packages", "no-such-package"])
