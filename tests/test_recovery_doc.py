"""The periods and back-offs that docs/recovery.md states are those of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from deltafront.service.config import ServiceConfig, parse

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "recovery.md").read_text(encoding="utf-8")
DEFAULTS = parse({"model": {"path": "m"}, "decode": {"page_selection": "full"}})


def value(name: str) -> float:
    section, _, key = name.rpartition(".")
    if section in ServiceConfig.model_fields:
        return float(getattr(getattr(DEFAULTS, section), key))
    return float(getattr(importlib.import_module(f"deltafront.{section}"), key))


def test_what_the_page_says_is_what_the_code_does() -> None:
    rows = re.findall(r"^\| .* \| ([0-9.]+) \| `([a-z_A-Z.]+)` \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == TEXT.count("\n| ") - 1, "every row but the head has a number and a name"
    assert {name: value(name) for _, name in rows} == {name: float(number) for number, name in rows}
