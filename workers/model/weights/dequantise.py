"""Computes quantised matrices in float32 from their stored parts. `directory/quantised.py` lists the parts'
names and shapes.

Shape suffixes: O outputs, I inputs, N groups of inputs.
"""

import json
from collections.abc import Mapping

import torch

from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.quantised import Quantised

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of the first to eighth output in a 32-bit word of AWQ."""

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_PAIRS = torch.stack(torch.meshgrid(*[torch.cat([_FP4, -_FP4])] * 2, indexing="xy"), -1).flatten(0, 1)
"""The two values of each byte of MXFP4."""

Parts = Mapping[str, torch.Tensor]


def dequantised(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    """Return the matrix weight_OI. `parts` maps the first name of each `Part` to its tensor. Raises
    ModelError."""
    return _FORMS[form.kind](form, parts, outputs, inputs)


def _fp8(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    weight, scale = parts["weight"], parts["weight_scale"].float()
    if scale.numel() == 1:
        return weight.float() * scale.reshape(1, 1)
    if form.block is None:
        return weight.float() * scale.reshape(outputs, 1)
    spread = scale.repeat_interleave(form.block[0], 0)[:outputs]
    return weight.float() * spread.repeat_interleave(form.block[1], 1)[:, :inputs]


def _awq(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    values_OI, zeros_ON = (_in_order(parts[name].T.contiguous()) for name in ("qweight", "qzeros"))
    return _scaled(values_OI, zeros_ON, parts["scales"].T, _groups(form, None, inputs))


def _in_order(words: torch.Tensor) -> torch.Tensor:
    rows = [(words >> 4 * place & 15).to(torch.uint8) for place in _AWQ_ORDER]
    return torch.stack(rows, 1).flatten(0, 1)


def _gptq(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    values_OI = _unpacked(parts["qweight"].T, form.bits)[:, :inputs]
    zeros_NO = (_unpacked(parts["qzeros"], form.bits)[:, :outputs] + form.zero_offset) & (2**form.bits - 1)
    return _scaled(values_OI, zeros_NO.T, parts["scales"].T, _groups(form, parts.get("g_idx"), inputs))


def _packed(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    """Dequantise compressed-tensors. Values and zero points are signed and stored with half their range
    added, except int8 zero points."""
    values_OI, scale_ON = _unpacked(parts["weight_packed"], form.bits)[:, :inputs], parts["weight_scale"]
    zeros_ON, half = parts.get("weight_zero_point"), 2 ** (form.bits - 1)
    if zeros_ON is None:
        zeros_ON = torch.full_like(scale_ON, half)
    elif zeros_ON.dtype == torch.int8:
        zeros_ON = zeros_ON.short() + half
    else:
        zeros_ON = _unpacked(zeros_ON.T, form.bits)[:, :outputs].T
    return _scaled(values_OI, zeros_ON, scale_ON, _groups(form, parts.get("weight_g_idx"), inputs))


def _nf4(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    """Dequantise nf4. A byte's upper half is the first of its two values. Blocks continue across rows."""
    state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
    if list(state["shape"]) != [outputs, inputs] or state["blocksize"] != 64:
        raise ModelError(f"its state says shape {state['shape']} in blocks of {state['blocksize']}")
    scale = parts["weight.absmax"]
    if form.nested:
        nested = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scale)]
        scale = parts["weight.nested_quant_map"][scale.int()] * nested + state["nested_offset"]
    data = parts["weight"].flatten()
    codes = torch.stack([data >> 4, data & 15], -1).flatten()[: outputs * inputs]
    numbers = parts["weight.quant_map"][codes.int()]
    return (numbers * scale.repeat_interleave(64)[: len(numbers)]).view(outputs, inputs)


def _mxfp4(form: Quantised, parts: Parts, outputs: int, inputs: int) -> torch.Tensor:
    """Dequantise MXFP4: 32 inputs share a power of two (OCP Microscaling Formats 1.0, section 5). A byte's
    lower half is the first of its two values."""
    values_OI = _FP4_PAIRS[parts["weight_blocks"].int()].view(outputs, -1)[:, :inputs]
    power_ON = torch.exp2(parts["weight_scales"].float() - 127)
    return values_OI * power_ON.repeat_interleave(32, 1)[:, :inputs]


_FORMS = {
    "FP8": _fp8,
    "AWQ": _awq,
    "GPTQ": _gptq,
    "compressed-tensors": _packed,
    "bitsandbytes nf4": _nf4,
    "MXFP4": _mxfp4,
}


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the unsigned values in each row's 32-bit words, lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack([data & 15, data >> 4], -1).flatten(-2)


def _groups(form: Quantised, given_I: torch.Tensor | None, inputs: int) -> torch.Tensor:
    if given_I is None:
        return torch.arange(inputs) // (form.group or inputs)
    if given_I.min() < 0 or given_I.max() > (inputs - 1) // (form.group or inputs):
        raise ModelError("its g_idx names groups that there are not")
    return given_I.long()


def _scaled(
    values_OI: torch.Tensor, zeros_ON: torch.Tensor, scale_ON: torch.Tensor, groups_I: torch.Tensor
) -> torch.Tensor:
    weight_OI = values_OI.float() - zeros_ON.float()[:, groups_I]
    return weight_OI.mul_(scale_ON.float()[:, groups_I])
