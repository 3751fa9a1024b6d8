"""A model's profile: a JSON file of calibrated values.

`prefill` has levels of thresholds for each attention method and the options that change its scores. A level
reaches one mean density at one prompt length. `decode` has the Δ-layers and the page budget, `measured`
the result of `deltafront evaluate`, `runs` the number of runs of similar keys in a block, by method and
layer. `figures` is only for human readers.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltafront.kernels.methods import PRESETS, MethodError, MethodSpec, method_spec, registered
from deltafront.kernels.options import ScoredOptions, Value
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import config_of, located, profile_file
from deltafront.workers.settings import Blocks, Count, DecodeConfig, Layer, ModelSpec

_OF_THE_RULE = frozenset({"tau", "outside", "density", "share", "min_tokens"})
"""Options of an attention method that do not change its tile scores: those that a level replaces, and
`min_tokens`. All other options change the scores or the tiles that are always kept."""

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ProfileError(ModelError):
    """A profile cannot be used. The message names the key."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfiledModel(_Section):
    """The calibrated model. `digest` is its `model_digest`."""

    name: str
    digest: Sha256


class ProfiledText(_Section):
    """A text used in calibration. `sha256` hashes its bytes; `tokens` is the number of tokens used."""

    sha256: Sha256
    tokens: Count

    @classmethod
    def of(cls, text: str, tokens: int) -> ProfiledText:
        return cls(sha256=hashlib.sha256(text.encode()).hexdigest(), tokens=tokens)


class Level(_Section):
    """The attention thresholds of all heads in all layers, calibrated to reach a mean density.

    Args:
        density: The density that requests ask for: the mean share of causal tiles computed for the longest
            prompts.
        tokens: The prompt length for which the thresholds were made.
        density_at_length: The mean share of causal tiles computed at that length. The file calls it `share`.
        thresholds: By [layer][query head]. The file calls them `amounts`.
    """

    density: Annotated[float, Field(gt=0, le=1)]
    tokens: Count
    density_at_length: Annotated[float, Field(gt=0, le=1)] = Field(alias="share")
    thresholds: tuple[tuple[Fraction, ...], ...] = Field(alias="amounts")


class MethodLevels(_Section):
    """The levels of one attention method, with the values of its options that change tile scores
    (`shaping_options`)."""

    method: str
    options: dict[str, Any]
    levels: Annotated[tuple[Level, ...], Field(min_length=1)]


class DecodePages(_Section):
    """Calibrated values for the keys of the same names in the configuration's section `decode`."""

    full_layers: tuple[Layer, ...]
    delta_layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    page_budget: Count
    recency: Count


class Measured(_Section):
    """The setting that an evaluation found for this model: the service's default.

    Args:
        tokens: Lengths of the shortest and the longest prompt.
        kept, low, high: The score divided by dense attention's, and the ends of the 95% interval.
        verdict: The result in one line, for people.
        texts: The texts that prompts were made of. No calibration may use them.
    """

    method: str
    options: dict[str, float] = {}
    recompute_blocks: Blocks = 0
    tokens: tuple[Count, ...]
    samples: Count
    density: Annotated[float, Field(gt=0)]
    dense: float
    score: float
    kept: float
    low: float
    high: float
    lost: int
    won: int
    verdict: str
    texts: tuple[ProfiledText, ...] = ()

    @property
    def setting(self) -> str:
        """Spell the setting as on a command line."""
        options = ",".join(f"{key}={value:g}" for key, value in self.options.items())
        method = f"{self.method}:{options}" if options else self.method
        return f"{method}@{self.recompute_blocks}" if self.recompute_blocks else method


class Profile(_Section):
    format: Literal[1]
    model: ProfiledModel
    texts: tuple[ProfiledText, ...]
    prefill: tuple[MethodLevels, ...]
    decode: DecodePages | None = None
    measured: Measured | None = None
    runs: dict[str, tuple[float | None, ...]] = {}
    figures: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        for problem in self._repeated():
            raise ValueError(problem)
        if self.measured is not None:
            for problem in self._measured_problems(self.measured):
                raise ValueError(f"measured.{problem}")
        if self.decode is not None:
            for problem in DecodeConfig(**self.decode.model_dump()).contradictions():
                raise ValueError(f"decode.{problem}")
        return self

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile. Raises ProfileError, which names the file and the key."""
        try:
            return cls.model_validate_json(path.read_bytes(), strict=True)
        except OSError as error:
            raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            problem = _problem(first["loc"], first["type"], first["msg"], first["input"])
            raise ProfileError(f"{path}: {problem}") from None

    def write(self, path: Path) -> None:
        """Write the profile atomically, with each row of values on one line. Raises ProfileError."""
        text = json.dumps(
            self.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False, allow_nan=False
        )
        rows = re.sub(r"\[\n[\d\s.,e+-]*\]", lambda match: " ".join(match[0].split()), text)
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(rows + "\n", encoding="utf-8")
            new.replace(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise ProfileError(f"{path} cannot be written: {error.strerror}") from None

    def plus(self, made: MethodLevels, texts: Sequence[ProfiledText]) -> Profile:
        """Return a profile with added levels. They replace levels of the same method, options, density and
        length.

        `texts` are the texts on which the new levels were calibrated. A measured setting with a density is
        dropped.
        """
        families = {_key(levels): levels for levels in self.prefill}
        key = _key(made)
        old = families[key].levels if key in families else ()
        levels = {(level.tokens, level.density): level for level in (*old, *made.levels)}
        families[key] = made.model_copy(update={"levels": tuple(levels[at] for at in sorted(levels))})
        new = tuple(text for text in texts if text not in self.texts)
        changed: dict[str, Any] = {"prefill": tuple(families.values()), "texts": (*self.texts, *new)}
        if self.measured is not None and "density" in self.measured.options:
            changed["measured"] = None  # its level may be another now
        return self.model_copy(update=changed)

    def check(self, config: ModelConfig, digest: str) -> None:
        """Raise ProfileError unless the profile fits this model and the known attention methods."""
        for problem in self._misfits(config, digest):
            raise ProfileError(problem)

    def _repeated(self) -> Iterator[str]:
        for place in _seconds([(levels.method, levels.options) for levels in self.prefill]):
            yield f"prefill[{place}]: {self.prefill[place].method} with these options is there already"
        for place, method in enumerate(self.prefill):
            for number in _seconds([(level.density, level.tokens) for level in method.levels]):
                where, level = f"prefill[{place}].levels[{number}]", method.levels[number]
                yield f"{where}: density {level.density} at {level.tokens} tokens is there already"

    def _measured_problems(self, measured: Measured) -> Iterator[str]:
        try:
            method_spec(measured.method, measured.options)
        except MethodError as error:
            yield f"{error.field}: {error}"
        if shared := {text.sha256 for text in self.texts} & {text.sha256 for text in measured.texts}:
            yield f"texts: {', '.join(sha[:12] for sha in sorted(shared))} calibrated the profile, too"

    def _misfits(self, config: ModelConfig, digest: str) -> Iterator[str]:
        if digest != self.model.digest:
            yield (
                f"model.digest: it was made for {self.model.name}, {self.model.digest[:12]}…; this model "
                f"with its adapter and overrides is {digest[:12]}…: calibrate it"
            )
        for place, method in enumerate(self.prefill):
            yield from _method_problems(f"prefill[{place}]", method)
            for number, level in enumerate(method.levels):
                yield from _shape_problems(f"prefill[{place}].levels[{number}].amounts", level, config)
        decode = self.decode
        for key in ("full_layers", "delta_layers") if decode is not None else ():
            for layer in getattr(decode, key):
                if layer >= config.layers:
                    yield f"decode.{key}: layer {layer} of a model with {config.layers} layers"


def load_profile(model: ModelSpec) -> Profile | None:
    """Read and check the profile at `model.profile`; None if that is None. Raises ProfileError, which names
    the key and the file."""
    if model.profile is None:
        return None
    try:
        path = profile_file(model.profile)
        profile = Profile.read(path)
    except ModelError as error:
        raise ProfileError(f"model.profile: {error}") from None
    try:
        model = located(model)
        profile.check(config_of(model), model_digest(model))
    except ProfileError as error:
        raise ProfileError(f"model.profile: {path}: {error}") from None
    return profile


def among(used: Sequence[ProfiledText], contents: Mapping[str, str]) -> list[str]:
    """Return the names of those `contents` (texts by name) that equal one of the `used` texts."""
    hashes = {text.sha256 for text in used}
    return [name for name, content in contents.items() if ProfiledText.of(content, 1).sha256 in hashes]


def shaping_options(spec: MethodSpec) -> dict[str, Value]:
    return {key: spec.values[key] for key in registered(spec).options if key not in _OF_THE_RULE}


def _key(levels: MethodLevels) -> tuple[Any, ...]:
    return levels.method, *sorted(levels.options.items())


def _seconds(keys: Sequence[Any]) -> Iterator[int]:
    return (place for place, key in enumerate(keys) if key in keys[:place])


def _method_problems(where: str, method: MethodLevels) -> Iterator[str]:
    preset = PRESETS.get(method.method)
    if preset is None or not issubclass(preset.form, ScoredOptions):
        yield f"{where}.method = {method.method!r}: no method that ranks tiles by a score"
        return
    known = shaping_options(method_spec(method.method))
    for key, value in method.options.items():
        if key not in known:
            yield f"{where}.options.{key}: no option that shapes scores; these do: {', '.join(known)}"
        elif not isinstance(value, int | float):
            yield f"{where}.options.{key} = {reprlib.repr(value)}: must be a number"
    if missing := known.keys() - method.options.keys():
        yield f"{where}.options: lacks {', '.join(sorted(missing))}"
    try:
        method_spec(method.method, method.options)
    except MethodError as error:
        yield f"{where}.{error.field.removeprefix('method_')}: {error}"


def _shape_problems(where: str, level: Level, config: ModelConfig) -> Iterator[str]:
    if len(level.thresholds) != config.layers:
        yield f"{where}: {len(level.thresholds)} rows for {config.layers} layers"
    for layer, row in enumerate(level.thresholds):
        if len(row) != config.q_heads:
            yield f"{where}[{layer}]: {len(row)} numbers for {config.q_heads} query heads"


def _problem(loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    if kind == "missing":
        return f"key {where!r} is missing"
    if kind == "extra_forbidden":
        return f"unknown key {where!r}"
    message = message.removeprefix("Value error, ").replace("Input should", "must", 1)
    return f"{where} = {reprlib.repr(value)}: {message}" if loc else message
