"""The configuration, read and checked once at start.

Each field has its bounds, here and in `workers/settings.py`. `ServiceConfig` checks combinations of fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from deltafront.kernels import methods
from deltafront.kernels.constants import DECODE_HEAD_DIMS, PAGE_TOKENS, PREFILL_HEAD_DIMS
from deltafront.service.settings import DoorConfig
from deltafront.workers.kv.pages.host_states import state_share
from deltafront.workers.kv.pages.host_tier import least_gib
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import profile_file
from deltafront.workers.model.family_registry import FamilyError, load_families
from deltafront.workers.settings import (
    DecodeConfig,
    HandoffConfig,
    ModelSpec,
    PrefillConfig,
)

_PACKAGE = Path(__file__).resolve().parents[1]
_WARM_UP_TOKENS = 256
LEAST_SLOTS = 4
"""State slots of a request that continues a session and makes one."""


@dataclass(frozen=True)
class DefaultAttention:
    """The attention of requests that name no method. measured: set by the operator or by a profile instead of
    the built-in default.
    """

    method: str
    measured: bool
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)


UNMEASURED = DefaultAttention("dense", measured=False)
"""The default without a profile. No sparse setting kept 0.97 of dense attention's score on all texts
(docs/experiments/0009)."""
RECOMPUTED = 32
"""Blocks recomputed after sparse prefill."""


class ConfigError(ValueError):
    """The configuration is wrong. The message names file and key."""


class ServiceConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSpec
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    handoff: HandoffConfig = HandoffConfig()
    door: DoorConfig = DoorConfig()

    @property
    def default_attention(self) -> DefaultAttention:
        if self.door.default_method:
            return DefaultAttention(self.door.default_method, True, self.door.default_options)
        if self.model.profile or self.prefill.unmeasured == "allow":
            return DefaultAttention("dpxa", measured=self.model.profile is not None)
        return UNMEASURED

    @property
    def compiled_prefill(self) -> PrefillConfig:
        """Section `prefill`. The methods to warm up, if there are any, include the default attention."""
        default, given = self.default_attention, self.prefill.warm_up
        if not given or (default.method, default.options) in self.prefill.warmed_up:
            return self.prefill
        return replace(self.prefill, warm_up=(*given, {default.method: default.options}))

    @property
    def recompute_blocks(self) -> int:
        if self.decode.recompute_blocks is not None:
            return self.decode.recompute_blocks
        return 0 if self.door.default_method == "dense" else RECOMPUTED

    def recompute_blocks_of(self, model: ModelConfig) -> int:
        """Return how many blocks are recomputed by default. A model whose layers have states recomputes
        none."""
        return 0 if model.state_layers else self.recompute_blocks

    @model_validator(mode="after")
    def _consistent(self) -> ServiceConfig:
        problems = [*self._family_problems(), *self._method_problems(), *self._contradictions()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _family_problems(self) -> Iterator[str]:
        for module in self.model.family_modules:
            try:
                load_families(module)
            except FamilyError as error:
                yield f"model.family_modules: {error}"

    def _method_problems(self) -> Iterator[str]:
        for module in self.prefill.method_modules:  # they register the methods checked below
            try:
                methods.load(module)
            except methods.MethodError as error:
                yield f"prefill.method_modules: {error}"
        for key, name, options in self._named_methods:
            try:
                spec = self.prefill.method(name, options)
            except methods.MethodError as error:
                yield f"{key}: {error}"
            else:
                if methods.reads_whole_prompts(spec.name):
                    yield f"{key}: {name} reads whole prompts only, not chunks"
        for name in self.prefill.method_options:
            if "+" in name:
                yield f"prefill.method_options.{name}: name the method; `+delta` takes the same"

    @property
    def _named_methods(self) -> Iterator[tuple[str, str, Mapping[str, float]]]:
        """Yield each named method once: its configuration key, its name and its options other than the
        defaults."""
        for name in (named := self.prefill.method_options):
            yield f"prefill.method_options.{name}", name, {}
        default = self.default_attention.method
        if default not in named:
            yield "door.default_method", default, {}
        if options := self.default_attention.options:
            yield "door.default_options", default, options
        for name, options in self.prefill.warmed_up:
            if options or name not in (*named, default):
                yield "prefill.warm_up", name, options

    def _contradictions(self) -> Iterator[str]:
        prefill, decode, door = self.prefill, self.decode, self.door
        for section, what, least, most in (
            ("prefill", "groups", prefill.groups, prefill.max_groups),
            ("decode", "workers", decode.workers, decode.max_workers),
        ):
            if most is not None and most < least:
                yield f"{section}.max_{what} = {most}: must be at least {section}.{what}"
        if prefill.cache_tokens < prefill.chunk_tokens:
            yield f"prefill.cache_tokens = {prefill.cache_tokens}: must be at least prefill.chunk_tokens"
        if prefill.stall_s <= self.handoff.ack_timeout_s:
            yield "prefill.stall_s: must be above handoff.ack_timeout_s, which a stage may wait for"
        if decode.warm_up and decode.cache_tokens < _WARM_UP_TOKENS:
            yield f"decode.warm_up: needs cache_tokens of at least {_WARM_UP_TOKENS}"
        if decode.page_selection == "delta" and not decode.delta_layers:
            yield "decode.delta_layers: empty, so page_selection must be full (calibrate layers for delta)"
        yield from (f"decode.{problem}" for problem in decode.contradictions())
        yield from self._transport_problems()
        if door.default_session_ttl_s > decode.max_session_ttl_s:
            yield "door.default_session_ttl_s: must not exceed decode.max_session_ttl_s"
        for key, lease in (("prefill", prefill.stream_lease_s), ("decode", decode.stream_lease_s)):
            if door.renew_s * 2 > lease:
                yield f"door.renew_s: must be at most half of {key}.stream_lease_s"
        if decode.host_cache_gib and not door.prefix_reuse:
            yield "decode.host_cache_gib: needs door.prefix_reuse: it is for prompts that are remembered"
        yield from door.contradictions()
        yield from self._quantisation_problems()

    def _transport_problems(self) -> Iterator[str]:
        if self.handoff.transport == "cuda_ipc" and "cpu" in (self.prefill.device, self.decode.device):
            yield "handoff.transport: cuda_ipc needs prefill.device and decode.device to be cuda"
        if self.handoff.transport == "nixl" and find_spec("nixl") is None:
            yield "handoff.transport: nixl needs the package nixl, which is not installed: deltafront[nixl]"
        if self.handoff.transport == "mapped":
            yield from (f"{problem}, with handoff.transport: mapped" for problem in self._mapped_problems())

    def _mapped_problems(self) -> Iterator[str]:
        prefill, decode = self.prefill, self.decode
        counts = {
            "prefill.groups": prefill.max_groups or prefill.groups,
            "prefill.stages": prefill.stages,
            "decode.workers": decode.max_workers or decode.workers,
            "decode.tensor_parallel": decode.tensor_parallel,
        }
        for key, count in counts.items():
            if count > 1:
                yield f"{key} = {count}: must be 1, a stage and a decode worker on one device"
        if prefill.device != decode.device:
            yield f"prefill.device = {prefill.device}: must be decode.device ({decode.device})"
        if prefill.cache_tokens != decode.cache_tokens:
            yield (
                f"prefill.cache_tokens = {prefill.cache_tokens}: must be decode.cache_tokens "
                f"({decode.cache_tokens}), since both use the same pages"
            )
        if prefill.surge or decode.surge:
            yield "prefill.surge and decode.surge: must be false"

    def _quantisation_problems(self) -> Iterator[str]:
        kind = self.model.quantisation
        if kind is None:
            return
        for key, device in (("prefill", self.prefill.device), ("decode", self.decode.device)):
            if device == "cpu":
                yield f"model.quantisation: {kind} needs a GPU, and {key}.device is cpu"
        if self.model.dtype == "float32":
            yield f"model.quantisation: {kind} goes with a model.dtype of 16 bits"

    def check_against(self, model: ModelConfig, profile: Profile | None) -> None:
        """Check the configuration against the model and its profile. Raises ConfigError."""
        named = self.decode.layer_problems(model.layers, model.windows, model.linear_layers)
        problems = [f"decode.{problem}" for problem in named]
        if self.decode.warm_up and model.positions < _WARM_UP_TOKENS:
            problems.append(f"decode.warm_up: needs a model of at least {_WARM_UP_TOKENS} positions")
        gib, number = self.decode.host_cache_gib, 4 if self.model.dtype == "float32" else 2
        token = model.kv_bytes(model.kv_layers, number, self.decode.kv_dtype is not None)
        state = model.state_bytes(range(model.layers), number)
        share = state_share(self.decode.cache_tokens * token, self.decode.state_slots * state)
        if 0 < gib < (least := least_gib(PAGE_TOKENS * token, state, share)):
            problems.append(f"decode.host_cache_gib = {gib:g}: must be 0, or at least {least + 5e-4:.3f}")
        # A decode worker prefills appended text with prefill's kernels.
        heads = PREFILL_HEAD_DIMS
        both = tuple(dim for dim in DECODE_HEAD_DIMS if dim in heads)
        for key, part, dims in (("prefill", self.prefill, heads), ("decode", self.decode, both)):
            if part.device == "cuda" and model.head_dim not in dims:
                taken, own = ", ".join(map(str, dims)), model.head_dim
                problems.append(
                    f"{key}.device: a GPU takes heads of {taken} channels there, the model's have {own}"
                )
        try:
            shares = model.split(self.prefill.stages)
        except ModelError as error:
            problems.append(f"prefill.stages: {error}")
        else:
            if model.state_layers:
                has_pages = all(map(model.page_layers, (share.layers for share in shares)))
                problems += self._state_problems(model, has_pages)
        try:
            widths = model.matrix_widths(self.decode.tensor_parallel)
            if self.model.quantisation is not None and any(width % 16 for width in widths):
                problems.append(f"model.quantisation: a rank's widths {widths} must be multiples of 16")
        except ModelError as error:
            problems.append(str(error))
        for key, name, options in self._named_methods:
            try:
                thresholds_for(profile, self.prefill.method(name, options))
            except methods.MethodError as error:
                problems.append(f"{key}: {error}")
        if problems:
            raise ConfigError("; ".join(problems))

    def _state_problems(self, model: ModelConfig, has_pages: bool) -> Iterator[str]:
        """Yield a message for each key that a model whose layers have states does not go with yet. has_pages:
        every stage has a layer with pages."""
        decode, states = self.decode, "rolling buffers" if model.rolling_buffer else "linear attention"
        if decode.recompute_blocks:
            why = f"a model with {states} recomputes no blocks, since its states have none"
            yield f"decode.recompute_blocks = {decode.recompute_blocks}: must be 0: {why}"
        if decode.state_slots < LEAST_SLOTS:
            yield f"decode.state_slots = {decode.state_slots}: must be at least {LEAST_SLOTS}"
        if not has_pages and self.prefill.device == "cuda":
            yield f"prefill.stages = {self.prefill.stages}: a stage would have {states} alone"

    def with_model(self, **changes: Any) -> ServiceConfig:
        return self.model_copy(update={"model": dataclasses.replace(self.model, **changes)})


def parse(
    content: Mapping[str, Any], source: str = "configuration", folder: Path | None = None
) -> ServiceConfig:
    """Parse and check a configuration given as plain data, from YAML or Serve's `args`. Raises ConfigError.

    Args:
        source: The data's name in error messages.
        folder: The folder to which relative paths refer.
    """
    try:
        return ServiceConfig.model_validate(_with_profile(content, folder), context={"folder": folder or ""})
    except ModelError as error:
        raise ConfigError(f"{source}: model.profile: {error}") from None
    except ValidationError as error:
        lines = [
            _problem(detail["loc"], detail["type"], detail["msg"], detail["input"])
            for detail in error.errors()
        ]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, which PyYAML accepts."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _value in node.value if isinstance(key, yaml.ScalarNode)]
        for before, key in itertools.combinations(keys, 2):
            if before.value == key.value:
                raise yaml.composer.ComposerError(
                    problem=f"key {key.value!r} is there twice", problem_mark=key.start_mark
                )
        return node


def load(path: Path) -> ServiceConfig:
    """Read a YAML configuration. A relative path may also refer to the package's samples. Paths in the
    file are relative to its folder. Raises ConfigError.
    """
    path = path if path.exists() or not (_PACKAGE / path).is_file() else _PACKAGE / path
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys {', '.join(_keys(()))}")
    return parse(content, str(path), path.parent.resolve())


def _with_profile(content: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Fill in the profile's values for decode and for requests that name no method. Raises ModelError."""
    model, decode, door = (content.get(section, {}) for section in ("model", "decode", "door"))
    if not all(isinstance(section, Mapping) for section in (model, decode, door)):
        return content
    if not isinstance(model.get("profile"), str):
        return content
    path = profile_file(model["profile"], folder)
    profile = Profile.read(path)
    decode = {**({} if profile.decode is None else profile.decode.model_dump()), **decode}
    if profile.measured is not None and not door.get("default_method"):
        found = profile.measured
        door = {**door, "default_method": found.method, "default_options": found.options}
        if decode.get("recompute_blocks") is None:
            decode = {**decode, "recompute_blocks": found.recompute_blocks}
    return {**content, "model": {**model, "profile": str(path)}, "decode": decode, "door": door}


def _problem(loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    where = ".".join(str(part) for part in loc)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        near = difflib.get_close_matches(str(loc[-1]), _keys(loc[:-1]), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_keys(loc[:-1]))}"
        return f"unknown key {where!r}; {hint}"
    if kind in ("missing", "missing_argument"):
        return f"key {where!r} is missing"
    if not loc:
        return message.removeprefix("Value error, ")
    if kind == "dataclass_type":
        return f"{where} = {value!r}: must be a section with keys {', '.join(_keys(loc))}"
    return f"{where} = {value!r}: {message.replace('Input should', 'must', 1).removeprefix('Input ')}"


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    sections = ServiceConfig.model_fields
    if not loc:
        return list(sections)
    kind: Any = sections[str(loc[0])].annotation
    for name in loc[1:]:
        forms = get_args(get_type_hints(kind)[str(name)])
        kind = next(filter(dataclasses.is_dataclass, forms), kind)
    return [field.name for field in dataclasses.fields(kind)]
