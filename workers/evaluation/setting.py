"""Settings that are compared: a prefill method, its options and recomputed blocks, and page selection."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.workers.settings import DecodeConfig, KVDtype


@dataclass(frozen=True)
class Setting:
    """An attention method with options, and the number of blocks to recompute densely for the question. With
    0 blocks, the prompt's end is not prefilled again either.

    delta: DELTA's page selection in decode, or the KV cache's format: `delta_config`'s argument. Empty:
        decode attends to all pages, in the model's dtype.
    """

    method: str
    blocks: int = 0
    delta: str = ""

    @classmethod
    def parse(cls, given: str) -> Setting:
        """Parse `METHOD[:OPTIONS][@BLOCKS][/DELTA]`. Raises ValueError."""
        prefill, slash, delta = given.partition("/")
        method, _, blocks = prefill.partition("@")
        if blocks and not blocks.isdecimal():
            raise ValueError(f"no setting {given!r}: METHOD, METHOD:OPTION=NUMBER,… or METHOD:…@BLOCKS")
        parse_method(method)
        if slash:
            delta_config(delta)
        return cls(method, int(blocks or 0), delta)

    @property
    def kv_dtype(self) -> KVDtype | None:
        return delta_config(self.delta).kv_dtype if self.delta else None

    def __str__(self) -> str:
        prefill = f"{self.method}@{self.blocks}" if self.blocks else self.method
        return f"{prefill}/{self.delta}" if self.delta else prefill


def delta_config(given: str) -> DecodeConfig:
    """Parse `delta_layers=2+14,page_budget=64` or `kv_dtype=int8`: keys of the configuration's section
    `decode`, lists with `+` between numbers. Raises ValueError."""
    if given == "kv_dtype=int8":
        return DecodeConfig(kv_dtype="int8")
    keys: dict[str, object] = {}
    for key, _, value in (pair.partition("=") for pair in given.split(",")):
        numbers, several = value.split("+"), key.endswith("_layers")
        right = key in ("delta_layers", "full_layers", "page_budget", "recency")
        if not right or not all(map(str.isdecimal, numbers)) or (len(numbers) > 1 and not several):
            raise ValueError(
                f"no page selection {given!r}: use delta_layers=NUMBER+NUMBER, full_layers=NUMBER+NUMBER, "
                "page_budget=NUMBER or recency=NUMBER, with commas between them, or kv_dtype=int8 alone"
            )
        keys[key] = [*map(int, numbers)] if several else int(value)
    config = TypeAdapter(DecodeConfig).validate_python(keys)
    for problem in config.contradictions():
        raise ValueError(problem)
    return config


def split_method(method: str) -> tuple[str, dict[str, float]]:
    """Split `dpxa:tau=0.9,k_anchors=16` into name and options. Raises ValueError."""
    name, _, given = method.partition(":")
    options: dict[str, float] = {}
    for pair in filter(None, given.split(",")):
        key, _, value = pair.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            raise ValueError(f"no method {method!r}: NAME, or NAME:OPTION=NUMBER,OPTION=NUMBER") from None
    return name, options


def parse_method(method: str) -> MethodSpec:
    """Parse `NAME:OPTION=NUMBER,…` and fill in defaults of options not given. Raises ValueError."""
    return method_spec(*split_method(method))


def known_method(method: str) -> str:
    """Check a method and return it as it was given. Raises ValueError."""
    parse_method(method)
    return method
