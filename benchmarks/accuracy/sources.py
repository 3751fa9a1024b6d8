"""Texts that nothing here was trained or tuned on: sources of Python packages, a text for each.

    python -m deltafront.benchmarks.accuracy.sources FOLDER [--packages NAME …]

Takes installed packages, of which SymPy and PyTorch are not among the default: their sources were read before
(docs/figures.md). Tests, data, tables and vendored copies of other packages are left out. Says each text's
version, characters and digest, for the record of a run.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from deltafront.benchmarks.accuracy.texts import read, tidy

PACKAGES = (
    "aiohttp", "fonttools", "fsspec", "google-api-core", "google-auth", "huggingface_hub", "hypothesis",
    "matplotlib", "mypy", "networkx", "numpy", "openai", "pillow", "pip", "pydantic", "Pygments", "ray",
    "rich", "setuptools", "transformers", "websockets",
)  # fmt: skip
"""Each has 131,072 tokens and more."""
LEFT_OUT = re.compile(r"test|benchmark|vendor|third_?party|tables|data|_pb2|thirdparty")
LEAST, MOST = 4_000, 150_000
"""Bytes of a file: shorter ones hold imports, longer ones tables."""


def files_of(package: str) -> Iterator[Path]:
    """In the order of their names. Raises SystemExit for a package that is not installed."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise SystemExit(f"{package} is not installed: pip install {package}, or leave it out") from None
    for name in sorted(found.files or (), key=str):
        path = Path(str(found.locate_file(name)))
        kept = path.suffix == ".py" and not LEFT_OUT.search(str(name)) and path.is_file()
        if kept and LEAST < path.stat().st_size < MOST:
            yield path


def text_of(package: str) -> str:
    return tidy("\n\n".join(read(path) for path in files_of(package)))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    arguments = parser.parse_args(given)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for package in arguments.packages:
        text = text_of(package)
        (arguments.folder / f"{package.lower()}.txt").write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        print(f"{package} {distribution(package).version}: {len(text)} characters, sha256 {digest}")


if __name__ == "__main__":
    main()
