"""Benchmarks: they measure the numbers in README and docs."""

from pathlib import Path

DEMO_TEXT = Path(__file__).resolve().parent.parent / "deploy" / "demo" / "moby-dick.txt"
