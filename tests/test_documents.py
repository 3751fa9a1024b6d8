"""Documents keep their size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
EXPERIMENTS = sorted((ROOT / "docs" / "experiments").glob("0*.md"))


def words(path: Path) -> int:
    """Count what holds a letter or a digit, comments left out."""
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
