"""Makes the tables of docs/models.md from the families' data and the public models' numbers."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from deltafront.benchmarks.markdown import markdown
from deltafront.benchmarks.models.public import REFUSED, SERVED, Public
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import FAMILIES


def read_public(model: Public) -> ModelConfig:
    """Read a public model's numbers as its config.json would be read. Raises ModelError."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config))
        return read_config(folder)


def families() -> str:
    """Make the table of families, one line each."""
    return markdown(
        ("family", "architecture", "GGUF", "note"), [_family(family) for family in FAMILIES.values()]
    )


def _family(family: Family) -> list[str]:
    names = ", ".join(f"`{name}`" for name in dict.fromkeys((family.architecture, *family.wrappers)))
    gguf = "" if family.gguf is None else f"`{family.gguf.architecture}`"
    return [family.name, names, gguf, family.note]


def public_models() -> str:
    rows: list[list[str | None]] = []
    for model in SERVED:
        config = read_public(model)
        size = f"{config.as_stored.weights(range(config.layers)) / 1e9:.3g} ({model.billions:g})"
        rows.append([f"`{model.name}`", size, ""])
    rows += [[f"`{model.name}`", None, f"refused: {_refusal(model)}"] for model in REFUSED]
    return markdown(("model", "10⁹ numbers (as published)", "note"), rows)


def _refusal(model: Public) -> str:
    try:
        read_public(model)
    except ModelError as error:
        told = re.sub(r"; known: .*|: use a model with.*|: set model\..*", "", str(error))
        return re.sub(r"architecture '\w+' is not supported \((.*)\)", r"\1", told)
    raise AssertionError(f"{model.name} is served")
