"""The registry of attention methods: their names, options and parts. It loads no torch; `build.py` loads the
parts.

The package registers its own methods at the end of this file. `load` imports other modules, which call
`register`. `+delta` after a name adds the Δ correction.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from deltafront.kernels import options as forms
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionBackend, KernelInputError, Selector
from deltafront.kernels.options import CorrectionOptions, Option, Value, options_of

O = TypeVar("O")  # noqa: E741


class MethodError(ValueError):
    """An unknown method or a wrong option. `field` names the field of the request."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name


@dataclass(frozen=True)
class Preset:
    """A registered method. `form` is its options' dataclass; `register` explains the other fields."""

    form: type[Any]
    selector: Callable[[Any], Selector] | str | None
    backend: Callable[[Any], AttentionBackend] | str
    source: str
    whole_prompt: bool
    from_keys: bool

    @property
    def options(self) -> Mapping[str, Option]:
        return options_of(self.form)

    @property
    def module(self) -> str:
        """The module that defines the options. A process imports it to register the method."""
        return self.form.__module__


@dataclass(frozen=True)
class MethodSpec:
    """A method's name, all its options' values, and the module that defines them; hashable and picklable."""

    name: str
    module: str
    correction: bool
    options: tuple[tuple[str, Value], ...]

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.options)


_presets: dict[str, Preset] = {}
PRESETS: Mapping[str, Preset] = MappingProxyType(_presets)
"""The registered methods by name, in alphabetical order."""


def register(
    name: str,
    options: type[O],
    selector: Callable[[O], Selector] | str | None,
    backend: Callable[[O], AttentionBackend] | str,
    *,
    source: str,
    whole_prompt: bool = False,
    from_keys: bool = False,
) -> None:
    """Register a method.

    Outside this package, call it in the module that defines the options. The API server imports that module,
    so it must not load torch: put the parts into another module and name them by path, as in
    `benchmarks/engine/peers.py`.

    Args:
        options: A frozen dataclass whose fields are made with `options.option`.
        selector, backend: A callable that makes the part from the options, or its path "module:object".
            Without a selector the backend chooses the keys.
        source: Paper and section.
        whole_prompt: The method cannot prefill in chunks, so the service refuses it.
        from_keys: A new state can be made from the keys alone (`interface.Attention`). Otherwise a prompt
            starts over when its prefill group dies, and its KV cache stays out of the prefix cache.

    Raises:
        MethodError: Another module has registered the name.
        TypeError: An option has no bounds.
    """
    if not name or "+" in name:
        raise MethodError("method", f"{name!r} cannot be a method's name")
    options_of(options)
    preset = Preset(options, selector, backend, source, whole_prompt, from_keys)
    if name in _presets and (known := _presets[name].module) != preset.module:
        raise MethodError("method", f"{preset.module}: {known} has registered a method {name!r}")
    _presets[name] = preset
    for other in sorted(_presets):
        _presets[other] = _presets.pop(other)


def load(module: str) -> None:
    """Import a module that registers methods. Raises MethodError."""
    try:
        import_module(module)
    except Exception as error:
        raise MethodError("method", f"{module} cannot be imported for its methods: {error!r}") from error
    if not any(f"{preset.module}.".startswith(f"{module}.") for preset in PRESETS.values()):
        raise MethodError("method", f"{module} registers no attention method")


def registered(spec: MethodSpec) -> Preset:
    """Return a spec's preset. Import the spec's module if the method is unknown. Raises MethodError."""
    base = spec.name.partition("+")[0]
    if base not in PRESETS:
        load(spec.module)
    preset = PRESETS.get(base)
    if preset is None or preset.module != spec.module:
        raise MethodError("method", f"{spec.module} registers no attention method {base!r}")
    return preset


def resume_step(spec: MethodSpec) -> int:
    """Return the alignment, in tokens, at which prefill can resume with a new state; 0 if it cannot resume.
    Raises MethodError.

    The Δ correction applies the last dense row's difference to later rows, so a resumed chunk must begin with
    a dense row.
    """
    preset = registered(spec)
    if preset.whole_prompt or not preset.from_keys:
        return 0
    return math.lcm(BLOCK, int(spec.values["gamma"])) if spec.correction else BLOCK


def lasting_tokens(spec: MethodSpec, tokens: int) -> int:
    """Count the first tokens of a prompt whose KV does not depend on later tokens. Raises MethodError.

    A longer prompt that begins with these tokens has the same KV cache for them, unless thresholds differ or
    only one of the two prompts is short enough for dense attention. A last, partial block does not count,
    because selectors score whole query blocks. With the Δ correction the last whole block does not count
    either, because it is computed densely. Sparse methods that are not registered `from_keys` get 0.
    """
    if is_exact(spec, tokens):
        return tokens
    if not registered(spec).from_keys:
        return 0
    return max(0, tokens // BLOCK - int(spec.correction)) * BLOCK


def is_exact(spec: MethodSpec, tokens: int) -> bool:
    """Say whether a prompt of `tokens` tokens gets exact attention."""
    return spec.name == "dense" or tokens <= spec.values.get("min_tokens", 0)


def reads_whole_prompts(name: str) -> bool:
    return PRESETS[name.partition("+")[0]].whole_prompt


def method_spec(name: str, options: Mapping[str, Value] | None = None) -> MethodSpec:
    """Check a method's name and options, and fill in defaults.

    Raises:
        MethodError: `field` names the wrong option or name.
    """
    base, plus, wrapper = name.partition("+")
    if base not in PRESETS or (plus and wrapper != "delta"):
        served = ", ".join(name for name, preset in PRESETS.items() if not preset.whole_prompt)
        raise MethodError("method", f"unknown attention method {name!r}; known: {served}, X+delta")
    preset = PRESETS[base]
    known = {**preset.options, **(options_of(CorrectionOptions) if plus else {})}
    given = dict(options or {})
    for key, value in given.items():
        if key not in known:
            takes = ", ".join(known) or "none"
            raise MethodError(f"method_options.{key}", f"{name} has no option {key!r}; it takes: {takes}")
        given[key] = _checked(f"method_options.{key}", value, known[key])
    filled = {key: given.get(key, option.default) for key, option in known.items()}
    try:
        preset.form(**{key: filled[key] for key in preset.options})
    except KernelInputError as error:
        raise MethodError("method_options", str(error)) from None
    return MethodSpec(name, preset.module, bool(plus), tuple(sorted(filled.items())))


def _checked(where: str, value: Value, option: Option) -> Value:
    number = float(value)
    if math.isnan(number) or not option.low <= number <= option.high:
        raise MethodError(where, f"{where} = {value} is outside {option.low} .. {option.high}")
    if isinstance(option.default, int):  # or a bool
        if number != int(number):
            raise MethodError(where, f"{where} = {value} is not a whole number")
        value = type(option.default)(number)
    if option.choices and value not in option.choices:
        raise MethodError(where, f"{where} = {value} is not one of {option.choices}")
    return value


def _own(
    name: str,
    options: type[Any],
    source: str,
    selector: str | None,
    backend: str = "block_sparse:BlockSparseBackend",
) -> None:
    chosen = None if selector is None else f"{__package__}.selectors.{selector}"
    register(name, options, chosen, f"{__package__}.attention.{backend}", source=source, from_keys=True)


_own("dense", forms.DenseOptions, "FlashAttention-2", None, "dense:DenseBackend")
_paper = "StreamingLLM (Xiao et al. 2023), section 3.2"
_own("streaming", forms.StreamingOptions, _paper, "streaming:StreamingSelector")
_paper = "DeltaAttention section 4.3, with the changes of docs/decisions/0003"
_own("dpxa", forms.AnchorsOptions, _paper, "anchors.selector:AnchorsSelector")
_paper = "XAttention (Xu et al. 2025), sections 2.1-2.2"
_own("xattention", forms.AntidiagonalOptions, _paper, "grouped.antidiagonal:AntidiagonalSelector")
_paper = "DeltaAttention section 4.1"
_own("delta_kv", forms.DeltaKVOptions, _paper, None, "packed.delta_kv:DeltaKVBackend")
_own(
    "delta_xattention",
    forms.DeltaXAttentionOptions,
    "DeltaAttention section 4.2",
    "grouped.antidiagonal:scoring_selector",
    "packed.delta_xattention:DeltaXAttentionBackend",
)
