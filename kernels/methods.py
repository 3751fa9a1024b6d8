"""The registry of attention methods: their names, their options and what they are made of.

Free of torch, so that the front door can check a request's method without loading it; `build.py` turns a
`MethodSpec` into something that runs. A method registers itself where it is defined (`register`): the
package's own are found by looking through `selectors/` and `executors/`, others are named by their module
(`load`). Appending `+delta` to any name wraps it in the Δ correction.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from .constants import BLOCK
from .correction import CorrectionOptions
from .interface import Executor, KernelInputError, Selector
from .options import Option, Value, options_of

O = TypeVar("O")  # noqa: E741


class MethodError(ValueError):
    """An unknown method, or an option it does not take; `field` names the offender."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name


@dataclass(frozen=True)
class Preset:
    """A registered method: a composition, its options and where it was published.

    form: the dataclass of its options. selector (None: everything causal) and executor are made from one of
    them. whole_prompt: it estimates from the prompt's last queries, which is wrong per chunk. from_keys: what
    it remembers between chunks follows from the keys alone (`interface.Attention` says what that allows).
    """

    form: type[Any]
    selector: Callable[[Any], Selector] | None
    executor: Callable[[Any], Executor]
    source: str
    whole_prompt: bool
    from_keys: bool

    @property
    def options(self) -> Mapping[str, Option]:
        return options_of(self.form)

    @property
    def module(self) -> str:
        """The module that registered it, which another process imports to have it too."""
        return self.form.__module__


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options filled in. Hashable; crosses processes.

    name: with `+delta` where `correction`. module: the one that registers the method.
    """

    name: str
    module: str
    correction: bool
    options: tuple[tuple[str, Value], ...]

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.options)


class _Presets(Mapping[str, Preset]):
    """What `register` was called with, by name. The package's own modules are imported at the first look."""

    def __init__(self) -> None:
        self._registered: dict[str, Preset] = {}
        self._lock = RLock()
        self._complete = False

    def add(self, name: str, preset: Preset) -> None:
        """Without the lock: a module that another thread imports registers while the first look goes on."""
        known = self._registered.setdefault(name, preset)
        if known.module != preset.module:
            raise MethodError("method", f"{preset.module}: {known.module} has registered a method {name!r}")
        self._registered[name] = preset

    def __getitem__(self, name: str) -> Preset:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Preset]:
        with self._lock:
            if not self._complete:
                for module in _own_modules():
                    import_module(module)
                self._complete = True
        return self._registered


def _own_modules() -> Iterator[str]:
    """The modules of `selectors/` and `executors/` that register a method, told by their text: the kernels
    beside them need torch and are not imported."""
    here = Path(__file__).parent
    for folder in ("selectors", "executors"):
        for found in pkgutil.iter_modules([str(here / folder)]):
            path = here / folder / f"{found.name}.py"
            if not found.ispkg and "\nregister(" in path.read_text(encoding="utf-8"):
                yield f"{__package__}.{folder}.{found.name}"


_presets = _Presets()
PRESETS: Mapping[str, Preset] = _presets
"""Every registered method by name, in alphabetical order."""


def register(
    name: str,
    options: type[O],
    selector: Callable[[O], Selector] | None,
    executor: Callable[[O], Executor],
    *,
    source: str,
    whole_prompt: bool = False,
    from_keys: bool = False,
) -> None:
    """Make a method known; called at the top of the module that defines it and its options.

    options: a frozen dataclass of that module, its fields made with `options.option`. selector and executor:
    what makes them from such options, usually their classes. source: paper and section. from_keys: see
    `Preset`; prompts of other methods start over where a prefill group dies. Importing the module must not
    load torch. Raises MethodError for a name that another module has taken.
    """
    if not name or "+" in name:
        raise MethodError("method", f"{name!r} cannot be a method's name")
    options_of(options)
    _presets.add(name, Preset(options, selector, executor, source, whole_prompt, from_keys))


def load(module: str) -> None:
    """Import a module outside the package for the methods that it registers. Raises MethodError."""
    try:
        import_module(module)
    except Exception as error:
        raise MethodError("method", f"{module} cannot be imported for its methods: {error!r}") from error
    if not any(f"{preset.module}.".startswith(f"{module}.") for preset in PRESETS.values()):
        raise MethodError("method", f"{module} registers no attention method")


def registered(spec: MethodSpec) -> Preset:
    """The method that a spec of any process names; its module is imported if it is not here yet.

    Raises MethodError.
    """
    base = spec.name.partition("+")[0]
    if base not in PRESETS:
        load(spec.module)
    preset = PRESETS.get(base)
    if preset is None or preset.module != spec.module:
        raise MethodError("method", f"{spec.module} registers no attention method {base!r}")
    return preset


def resume_step(spec: MethodSpec) -> int:
    """A prompt can be resumed, with a new state, at the multiples of so many tokens; 0: at none of them.

    The Δ correction carries the difference of the last dense row from chunk to chunk, which only queries that
    are gone could tell; a chunk that begins with a dense row of its own does not need it. Raises MethodError.
    """
    preset = registered(spec)
    if preset.whole_prompt or not preset.from_keys:
        return 0
    return math.lcm(BLOCK, int(spec.values["gamma"])) if spec.correction else BLOCK


def is_exact(spec: MethodSpec, tokens: int) -> bool:
    """Whether a prompt of so many tokens gets the keys and values of exact attention."""
    return spec.name == "dense" or tokens <= spec.values.get("min_tokens", 0)


def reads_whole_prompts(name: str) -> bool:
    """Whether a known method can only take a prompt in one piece, so that the service refuses it."""
    return PRESETS[name.partition("+")[0]].whole_prompt


def method_spec(name: str, options: Mapping[str, Value] | None = None) -> MethodSpec:
    """Check a method's name and options and fill in defaults. Raises MethodError naming the field."""
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
    if isinstance(option.default, int):  # bool among them
        if number != int(number):
            raise MethodError(where, f"{where} = {value} is not a whole number")
        value = type(option.default)(number)
    if option.choices and value not in option.choices:
        raise MethodError(where, f"{where} = {value} is not one of {option.choices}")
    return value
