"""Documents stay within their limits of words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
EXPERIMENTS = sorted((ROOT / "docs" / "experiments").glob("0*.md"))


def words(path: Path) -> int:
    """Count the words with a letter or a digit, without comments."""
    text = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    return len([word for word in text.split() if re.search(r"\w", word)])


def test_pages_have_at_most_30_000_words_together() -> None:
    assert sum(words(path) for path in (ROOT / "docs").glob("*.md")) <= 30_000


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name[:4])
def test_decision_has_at_most_300_words(path: Path) -> None:
    assert words(path) <= 300


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name[:4])
def test_experiment_has_at_most_400_words_and_a_table(path: Path) -> None:
    assert words(path) <= 400
    assert "\n|---" in path.read_text()


def test_pages_that_code_names_exist() -> None:
    """A removed page is named with its commit: `docs/log/2026-11-21.md at 4fe709c6`."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"no list of files here: {listed.stderr.strip()}")
    kinds = (".py", ".yaml", ".json", ".sh", ".proto", ".toml", ".md")
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(kinds)]
    missing = [
        f"{path.relative_to(ROOT)}: {page}"
        for path in paths
        if path.exists() and path.parts[-2] != "results"
        for page in re.findall(r"(?<!:)\bdocs/[\w./-]+\.md(?! at [0-9a-f]{7})", path.read_text())
        if not (ROOT / page).exists() and path != Path(__file__)
    ]
    assert not missing
