"""What the figures in README and docs come from."""

from pathlib import Path

DEMO_TEXT = Path(__file__).resolve().parent.parent / "deploy" / "demo" / "moby-dick.txt"
