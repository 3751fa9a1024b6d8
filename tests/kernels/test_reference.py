"""That nothing which serves imports an oracle or what tests share."""

from __future__ import annotations

import ast
from pathlib import Path

import deltafront

ROOT = Path(deltafront.__file__).parent
FOR_TESTS = ("reference", "testing", "structured")


def test_production_code_imports_no_oracle() -> None:
    serving = [
        path
        for folder in ("kernels", "workers", "service")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem not in FOR_TESTS and path.parent.name not in FOR_TESTS
    ]
    assert len(serving) > 100
    for path in serving:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not set(FOR_TESTS) & set(parts), f"{path}: {ast.unparse(node)}"
