"""Describes quantised checkpoints: their formats in config.json, and the tensors in which a matrix is stored.

It imports no torch; `weights/dequantise.py` computes the matrices. Stored scales of activations and KV are
ignored: activations are quantised dynamically, and KV has 16 bits or its own scale per row (decision 0022).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deltafront.workers.model.directory.model_files import ModelError, read_json, read_json_or_empty
from deltafront.workers.model.directory.text_part import text_config

FLOATS = ("F64", "F32", "F16", "BF16")
"""Names of floating-point dtypes in safetensors."""
_KV_SCALES = ("k_scale", "v_scale", "kv_scale")
_IGNORED = (*_KV_SCALES, "input_scale", "activation_scale", "output_scale", "q_scale")
_SERVED = (
    "take the model in 16 bits, or in FP8 (compressed-tensors, ModelOpt, or blocks of 128 × 128), AWQ (gemm, "
    "4 bits), GPTQ or compressed-tensors (pack-quantized; 4 or 8 bits), bitsandbytes nf4, or gpt-oss's MXFP4"
)
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which quantisers describe the format if config.json does not, with the method that each
implies."""
_NF4_BLOCK, _NF4_NESTED_BLOCK = 64, 256

Shape = tuple[int, ...]
_OF_ONE_WIDTH = "FP8", "bitsandbytes nf4", "MXFP4"
Kind = Literal["FP8", "AWQ", "GPTQ", "compressed-tensors", "bitsandbytes nf4", "MXFP4"]


@dataclass(frozen=True)
class Part:
    """One of the stored tensors of a quantised matrix X.weight. Its name is `X.` followed by one of `names`.

    Args:
        dtypes: The allowed dtypes.
        shapes: The allowed shapes; empty: any.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False

    def find(self, stem: str, names: Collection[str]) -> str | None:
        return next((stem + name for name in self.names if stem + name in names), None)

    def problem(self, dtype: str, shape: Shape) -> str:
        """Return an error message about a tensor's dtype or shape; empty if both are right."""
        if dtype in self.dtypes and (not self.shapes or shape in self.shapes):
            return ""
        kind = "floats" if self.dtypes == FLOATS else self.dtypes[0]
        return f"is {dtype} {shape} instead of {kind} {self.shapes[0] if self.shapes else ''}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """The storage format of a checkpoint's quantised matrices.

    Args:
        group: Number of inputs that share a scale; None: all inputs.
        block: Numbers of outputs and inputs that share an FP8 scale; None: one scale per output, or one per
            matrix.
        zero_offset: The real zero point minus the stored one.
        ordered: True if a tensor gives the group of each input (GPTQ's act-order).
        symmetric: True if there are no zero points.
        nested: True if the scales are quantised, too.
    """

    kind: Kind
    bits: int = 8
    group: int | None = None
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    ordered: bool = False
    symmetric: bool = False
    nested: bool = False

    @property
    def name(self) -> str:
        return self.kind if self.kind in _OF_ONE_WIDTH else f"{self.kind} of {self.bits} bits"

    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        return _PARTS[self.kind](self, outputs, inputs)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Name endings of tensors that only quantised matrices have."""
        return tuple(name for part in self.parts(1, 1) for name in part.names if name != "weight")

    def matrices(self, names: Iterable[str]) -> frozenset[str]:
        """Return `X.` for each quantised matrix X.weight. A matrix is quantised if `names` has one of its
        further parts, such as scales."""
        suffixes = tuple(f".{suffix}" for suffix in self.suffixes)
        ends = {name: next((end for end in suffixes if name.endswith(end)), None) for name in names}
        return frozenset(name.removesuffix(end) + "." for name, end in ends.items() if end)


_WITHOUT_OPTIONS = {
    "modelopt": Quantised(kind="FP8"),
    "mxfp4": Quantised(kind="MXFP4", bits=4, group=32),
}
"""Forms by quant_method, of those whose tensors have one layout."""


def _fp8(form: Quantised, outputs: int, inputs: int) -> tuple[Part, ...]:
    shapes: tuple[Shape, ...] = ((), (1,), (1, 1))
    if form.block is None:
        shapes = ((outputs, 1), (outputs,), *shapes)
    else:
        shapes = ((-(-outputs // form.block[0]), -(-inputs // form.block[1])), *shapes)
    return (
        Part(("weight",), ("F8_E4M3",), ((outputs, inputs),)),
        Part(("weight_scale", "weight_scale_inv"), FLOATS, shapes),
    )


def _awq(form: Quantised, outputs: int, inputs: int) -> tuple[Part, ...]:
    groups, packed = _groups(form, inputs), _words(form, outputs)
    return (
        Part(("qweight",), ("I32",), ((inputs, packed),)),
        Part(("qzeros",), ("I32",), ((groups, packed),)),
        Part(("scales",), FLOATS, ((groups, outputs),)),
    )


def _gptq(form: Quantised, outputs: int, inputs: int) -> tuple[Part, ...]:
    groups = _groups(form, inputs)
    return (
        Part(("qweight",), ("I32",), ((_words(form, inputs), outputs),)),
        Part(("qzeros",), ("I32",), ((groups, _words(form, outputs)),)),
        Part(("scales",), FLOATS, ((groups, outputs),)),
        Part(("g_idx",), ("I32",), ((inputs,),), optional=not form.ordered),
    )


def _packed(form: Quantised, outputs: int, inputs: int) -> tuple[Part, ...]:
    groups, rows = _groups(form, inputs), _words(form, outputs)
    return (
        Part(("weight_packed",), ("I32",), ((outputs, _words(form, inputs)),)),
        Part(("weight_scale",), FLOATS, ((outputs, groups),)),
        Part(("weight_zero_point",), ("I32", "I8"), ((rows, groups), (outputs, groups)), form.symmetric),
        Part(("weight_g_idx",), ("I32",), ((inputs,),), optional=not form.ordered),
        Part(("weight_shape",), ("I64", "I32"), ((2,),), optional=True),
    )


def _nf4(form: Quantised, outputs: int, inputs: int) -> tuple[Part, ...]:
    blocks = -(-outputs * inputs // _NF4_BLOCK)
    nested = -(-blocks // _NF4_NESTED_BLOCK)
    scales = ("weight.nested_absmax", nested), ("weight.nested_quant_map", 256)
    return (
        Part(("weight",), ("U8",), ((-(-outputs * inputs // 2), 1),)),
        Part(("weight.absmax",), ("U8" if form.nested else "F32",), ((blocks,),)),
        Part(("weight.quant_map",), ("F32",), ((16,),)),
        *(Part((name,), ("F32",), ((size,),)) for name, size in scales if form.nested),
        Part(("weight.quant_state.bitsandbytes__nf4",), ("U8",), ()),
    )


def _mxfp4(form: Quantised, outputs: int, inputs: int) -> tuple[Part, ...]:
    groups = _groups(form, inputs)
    return (
        Part(("weight_blocks",), ("U8",), ((outputs, groups, 16),)),
        Part(("weight_scales",), ("U8",), ((outputs, groups),)),
    )


_PARTS = {
    "FP8": _fp8,
    "AWQ": _awq,
    "GPTQ": _gptq,
    "compressed-tensors": _packed,
    "bitsandbytes nf4": _nf4,
    "MXFP4": _mxfp4,
}


def _groups(form: Quantised, inputs: int) -> int:
    return -(-inputs // (form.group or inputs))


def _words(form: Quantised, values: int) -> int:
    return -(-values * form.bits // 32)


def quantised_form(directory: Path, config: Mapping[str, Any] | None = None) -> Quantised | None:
    """Return the format of a model's quantised weights; None if they are not quantised.

    `config` is the content of config.json, if it is already read.

    Raises:
        ModelError: The format is not supported.
    """
    config = text_config(read_json(directory / "config.json")) if config is None else config
    file, given = "config.json", config.get("quantization_config")
    if not given:
        file, given = _beside(directory)
    if not given:
        return None
    if not isinstance(given, dict):
        raise ModelError(f"{directory / file}: quantization_config = {given!r} is not a section of keys")
    try:
        return _form(given)
    except ModelError as error:
        raise ModelError(f"{directory / file}: {error}") from None
    except (AttributeError, TypeError):
        raise ModelError(f"{directory / file}: quantization_config = {given} is not understood") from None


def is_ignored(name: str) -> bool:
    return name.rpartition(".")[2] in _IGNORED


def has_kv_scales(names: Iterable[str]) -> bool:
    return any(name.rpartition(".")[2] in _KV_SCALES for name in names)


def _beside(directory: Path) -> tuple[str, dict[str, Any]]:
    for file, method in _BESIDE.items():
        if given := read_json_or_empty(directory / file):
            section = given.get("quantization")
            return file, {"quant_method": method, **(section if isinstance(section, dict) else given)}
    return "", {}


def _form(given: Mapping[str, Any]) -> Quantised:
    method = str(given.get("quant_method"))
    if method == "compressed-tensors":
        return _compressed(given)
    detail = _detail(given, method)
    match method, detail:
        case "fp8", _:
            return Quantised(kind="FP8", block=_block(given.get("weight_block_size")))
        case ("modelopt", "FP8") | ("mxfp4", _):
            return _WITHOUT_OPTIONS[method]
        case "awq", "gemm":
            return Quantised(kind="AWQ", bits=_bits(given, method, 4), group=_group(given))
        case "gptq", "gptq" | "gptq_v2":
            return Quantised(
                kind="GPTQ",
                bits=_bits(given, method, 4, 8),
                group=_group(given),
                ordered=bool(given.get("desc_act")),
                zero_offset=int(detail == "gptq"),
            )
        case "bitsandbytes", "nf4":
            nested = bool(given.get("bnb_4bit_use_double_quant"))
            return Quantised(kind="bitsandbytes nf4", bits=4, nested=nested)
    said = f" ({detail})" if detail else ""
    raise ModelError(f"weights quantised by {method}{said} are not served: {_SERVED}")


def _detail(given: Mapping[str, Any], method: str) -> str:
    if method == "bitsandbytes":
        return "int8" if given.get("load_in_8bit") else str(given.get("bnb_4bit_quant_type", "fp4"))
    if method == "gptq" and given.get("is_marlin_format"):
        return "marlin"
    keys = {"awq": ("version",), "modelopt": ("quant_algo",)}.get(method, ())
    default = {"awq": "gemm", "gptq": "gptq"}.get(method, "")
    found = next((given[key] for key in (*keys, "checkpoint_format", "format") if given.get(key)), default)
    return str(found).lower() if default else str(found)


def _bits(given: Mapping[str, Any], method: str, *served: int) -> int:
    bits = given.get("bits", given.get("w_bit"))
    if bits not in served:
        raise ModelError(f"weights quantised by {method} in {bits} bits are not served: {_SERVED}")
    return int(bits)


def _group(given: Mapping[str, Any]) -> int | None:
    size = given.get("group_size", given.get("q_group_size"))
    if size in (None, -1):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ModelError(f"group_size = {size!r} is no number of weights")
    return size


def _compressed(given: Mapping[str, Any]) -> Quantised:
    keys = ("type", "num_bits", "strategy", "group_size", "symmetric", "actorder", "block_structure")
    groups = list((given.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    layouts = {group.get("format") or given.get("format") for group in groups}
    if (kinds := len({str([each.get(key) for key in keys]) for each in weights}) * len(layouts)) != 1:
        raise ModelError(f"compressed-tensors with {kinds} kinds of weights are not served: {_SERVED}")
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if given.get("transform_config") or sparsity != "dense":
        raise ModelError(f"compressed-tensors that are sparse or rotated are not served: {_SERVED}")
    form: list[Any] = [weights[0].get(key) for key in keys]
    kind, bits, strategy, group, symmetric, order, block = form
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block"):
        return Quantised(kind="FP8", block=_block(block) if strategy == "block" else None)
    packed = layouts == {"pack-quantized"} and kind == "int" and bits in (4, 8)
    if not packed or strategy not in ("group", "channel"):
        raise ModelError(
            f"compressed-tensors weights of {bits} bits ({kind}, by {strategy}) are not served: {_SERVED}"
        )
    return Quantised(
        kind="compressed-tensors",
        bits=bits,
        group=_group({"group_size": group}) if strategy == "group" else None,
        symmetric=symmetric is not False,
        ordered=order in ("group", "dynamic", True),
    )


def _block(given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        rows, columns = map(int, sizes)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise ModelError(f"{given!r} is no size of blocks of weights")
    return rows, columns
