"""Makes profiles for tests, for a given model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltafront.kernels.methods import method_spec
from deltafront.workers.model.calibrated.profile import (
    DecodePages,
    Level,
    MethodLevels,
    Profile,
    ProfiledModel,
    ProfiledText,
    shaping_options,
)
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.settings import ModelSpec

TEXT = ProfiledText(sha256="ab" * 32, tokens=900)


def rising(layers: int, heads: int, first: float, last: float) -> tuple[tuple[float, ...], ...]:
    """Return thresholds that differ in every layer and head."""
    step = (last - first) / (layers * heads)
    return tuple(
        tuple(first + step * (layer * heads + head) for head in range(heads)) for layer in range(layers)
    )


def levels_of(
    config: Any, method: str, levels: Mapping[tuple[float, int], Sequence[float]], **options: Any
) -> MethodLevels:
    """Make levels from `levels`: (density, tokens), with the first and last threshold."""
    made = [
        Level(
            density=density,
            tokens=tokens,
            share=density,
            amounts=rising(config.layers, config.q_heads, *ends),
        )
        for (density, tokens), ends in levels.items()
    ]
    shaping = shaping_options(method_spec(method, options))
    return MethodLevels(method=method, options=shaping, levels=tuple(made))


def make_profile(directory: Path, **changes: Any) -> Profile:
    """Make a profile with xattention at two densities, one of them for two lengths, and dpxa at one."""
    config, spec = read_config(directory), ModelSpec(path=str(directory))
    pool = {(0.2, 256): (0.1, 0.4), (0.2, 1024): (0.3, 0.6), (0.5, 1024): (0.7, 0.9)}
    parts: dict[str, Any] = {
        "format": 1,
        "model": ProfiledModel(name="tiny", digest=model_digest(spec)),
        "texts": (TEXT,),
        "prefill": (
            levels_of(config, "xattention", pool, window=1),
            levels_of(config, "dpxa", {(0.3, 512): (0.2, 0.8)}, window=128),
        ),
        "decode": DecodePages(full_layers=(0,), delta_layers=(1, 3), page_budget=32, recency=4),
        "figures": {"kl": 0.05, "held out": ["a", 3]},
    }
    return Profile(**{**parts, **changes})


def write_profile(directory: Path, path: Path, **changes: Any) -> Path:
    make_profile(directory, **changes).write(path)
    return path
