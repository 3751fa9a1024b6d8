"""Finds the language model in a checkpoint, which may be multimodal, and maps tensor names to ours. It
imports no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deltafront.workers.model.directory.model_files import ModelError, few, natural, positive_int
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import family_of, wrapped_architectures

_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""For each prefix of the language model's tensors in multimodal checkpoints of transformers 4 and 5, the
prefix in a text-only checkpoint."""

_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_ENDS = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}

Shape = tuple[int, ...]


def is_wrapped(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and bool(named) and named[0] in wrapped_architectures()


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of config.json. Raises ModelError if there is none."""
    if not is_wrapped(config):
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json: {config['architectures'][0]} has no section text_config")
    outer = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    own = {key: value for key, value in text.items() if value is not None or key not in outer}
    tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}  # outer wins
    return outer | own | tied


def own_names(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Map our names of the language model's tensors to their names in a checkpoint.

    Vision tensors and multi-token-prediction layers are left out. `config` is the content of config.json.
    """
    text = text_config(config)
    family = family_of(text)
    texts = _text_names(names) if is_wrapped(config) else {name: name for name in names}
    if family is None:
        return texts
    own = {family.own_name(text): name for text, name in texts.items()}
    further = further_layers(family.own_config(text), family)
    return {name: stored for name, stored in own.items() if not name.startswith(further)}


def further_layers(raw: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Return the prefixes of the names of multi-token-prediction tensors (DeepSeek-V3, arXiv 2412.19437,
    section 2.2).

    `raw` is config.json under our keys.
    """
    if "num_nextn_predict_layers" not in family.implied:
        return family.unread
    first = positive_int(raw, "num_hidden_layers")
    count = few(raw, "num_nextn_predict_layers", natural(raw, "num_nextn_predict_layers"))
    return tuple(f"model.layers.{n}." for n in range(first, first + count))


def _text_names(names: Iterable[str]) -> dict[str, str]:
    found = {name: name for name in names if name.startswith("lm_head.")}
    for name in names:
        for prefix, own in _PREFIXES.items():
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = name
    return found


@dataclass(frozen=True)
class ExpertPart:
    """One expert's part of a tensor with all experts of a layer: the rows `rows` of its matrix.

    gpt-oss alternates rows of gate and up. In 16 bits its tensors are [experts, inputs, outputs]; in MXFP4
    their parts are [experts, outputs, …]; biases are [experts, outputs]. Qwen3.5 has all rows of gate first,
    in tensors of [experts, outputs, inputs].

    Attributes:
        stacked: Our name of the stacked tensor.
        transposed: True if the tensor holds the matrix by columns.
    """

    stacked: str
    expert: int
    rows: slice
    transposed: bool

    def shape(self, stacked: Shape) -> Shape:
        own = stacked[:0:-1] if self.transposed else stacked[1:]
        return (len(range(own[0])[self.rows]), *own[1:]) if own else ()


def expert_parts(shapes: Mapping[str, Shape], experts: int, alternate: bool) -> dict[str, ExpertPart]:
    """Map the name of each expert's own tensor, such as `model.layers.0.mlp.experts.3.up_proj.weight`, to its
    part of a stacked tensor.

    Args:
        shapes: The shapes of a checkpoint's tensors, by our names. Tensors that are not of `experts` experts
            are left out.
        alternate: True if rows of gate and up alternate in the stacked tensors.
    """
    return {
        name: part
        for stacked, shape in shapes.items()
        if shape and shape[0] == experts
        for name, part in _parts_of(stacked, shape, alternate)
    }


def _parts_of(stacked: str, shape: Shape, alternate: bool) -> Iterator[tuple[str, ExpertPart]]:
    if (found := _STACKED.fullmatch(stacked)) is None:
        return
    prefix, module, end = found.groups()
    transposed = alternate and not end
    for expert in range(shape[0]):
        for own, rows in _rows_of(module, shape, alternate).items():
            yield f"{prefix}{expert}.{own}.{_ENDS[end]}", ExpertPart(stacked, expert, rows, transposed)


def _rows_of(module: str, shape: Shape, alternate: bool) -> dict[str, slice]:
    if module == "down_proj":
        return {module: slice(None)}
    if alternate:
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    half = shape[1] // 2 if len(shape) > 1 else 0
    return {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
