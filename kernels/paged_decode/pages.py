"""Inputs of paged decode attention, and their checks.

Shape suffixes: R requests, H query heads, G key/value heads, D head dimension, S tokens of a page (16), K
maximum number of selected pages. P counts pages of the pool in k and v, pages of one request in tables and
page scores.
"""

from dataclasses import dataclass

import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers.kv_int8 import BYTES, Scales, check_quantised

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PagedInput:
    """One query token of each request, with the request's cached keys and values. The constructor checks
    them.

    Query head h reads key head h // (H // G). Page ids and lengths stay on the device and are not checked.

    Attributes:
        q_RHD: In the dtype of k and v or in float32; with 8-bit pages in any float dtype.
        k_PSGD, v_PSGD: Pages of 16 tokens ("NHD").
        table_RP: int32, each request's page ids in order. Columns past ceil(length / 16) are never read.
        lengths_R: int32, at least 1.
        scale: Factor of q · k.
        scales: Scales of 8-bit pages (`layers.kv_int8`), [P, S, G].
        window: Number of last tokens to attend to. 0: all.

    Raises:
        KernelInputError: No implementation takes these shapes, dtypes, devices or strides.
    """

    q_RHD: torch.Tensor
    k_PSGD: torch.Tensor
    v_PSGD: torch.Tensor
    table_RP: torch.Tensor
    lengths_R: torch.Tensor
    scale: float
    scales: Scales | None = None
    window: int = 0

    def __post_init__(self) -> None:
        _check_floats(self.q_RHD, self.k_PSGD, self.v_PSGD, self.scales)
        _check_integers("table", self.table_RP, 2, self.q_RHD)
        _check_integers("lengths", self.lengths_R, 1, self.q_RHD)
        if not (self.scale > 0 and self.scale < float("inf")):
            raise KernelInputError(f"scale {self.scale} is not a positive number")

    @property
    def group(self) -> int:
        """Number of query heads that share one key head."""
        return self.q_RHD.shape[1] // self.k_PSGD.shape[2]


@dataclass(frozen=True)
class SelectedPages:
    """The pages of each request to attend to. The constructor checks them against `x`.

    Attributes:
        selected_RK: int32, ascending columns of the page table, of which the first counts_R are used.
        counts_R: int32. 0: attend to all pages.
    """

    x: PagedInput
    selected_RK: torch.Tensor
    counts_R: torch.Tensor

    def __post_init__(self) -> None:
        _check_integers("selected", self.selected_RK, 2, self.x.q_RHD)
        _check_integers("counts", self.counts_R, 1, self.x.q_RHD)


def _check_floats(
    q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, scales: Scales | None
) -> None:
    for name, x, dims in (("q", q_RHD, 3), ("k", k_PSGD, 4), ("v", v_PSGD, 4)):
        if x.dim() != dims or x.numel() == 0:
            raise KernelInputError(
                f"{name} must have {dims} dimensions, none of them 0, not {tuple(x.shape)}"
            )
        if x.dtype not in _FLOATS and not (x.dtype == BYTES and name != "q" and scales is not None):
            raise KernelInputError(f"{name}: dtype {x.dtype} is not float32, float16 or bfloat16")
        if x.stride(-1) != 1:
            raise KernelInputError(f"{name}: the head dimension must be contiguous, stride is {x.stride(-1)}")
        if x.device != q_RHD.device:
            raise KernelInputError(f"{name} is on {x.device}, but q is on {q_RHD.device}")
    if k_PSGD.shape != v_PSGD.shape or k_PSGD.dtype != v_PSGD.dtype:
        raise KernelInputError(
            f"k {tuple(k_PSGD.shape)} {k_PSGD.dtype} and v {tuple(v_PSGD.shape)} {v_PSGD.dtype} differ"
        )
    if scales is not None:
        _check_scales(k_PSGD, v_PSGD, scales)
    elif q_RHD.dtype not in (k_PSGD.dtype, torch.float32):
        raise KernelInputError(f"q is {q_RHD.dtype}: it must be float32 or the pages' {k_PSGD.dtype}")
    if k_PSGD.shape[1] != PAGE_TOKENS:
        raise KernelInputError(f"a page must hold {PAGE_TOKENS} tokens, k has {k_PSGD.shape[1]}")
    if q_RHD.shape[2] != k_PSGD.shape[3]:
        raise KernelInputError(f"q has head dimension {q_RHD.shape[2]}, k has {k_PSGD.shape[3]}")
    if q_RHD.shape[1] % k_PSGD.shape[2]:
        raise KernelInputError(f"{q_RHD.shape[1]} query heads on {k_PSGD.shape[2]} key heads: not a multiple")


def _check_scales(k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, scales: Scales) -> None:
    check_quantised("k", k_PSGD, scales.k)
    check_quantised("v", v_PSGD, scales.v)
    if k_PSGD.stride() != v_PSGD.stride() or scales.k.stride() != scales.v.stride():
        raise KernelInputError("k and v in 8 bits must have the same strides")
    if k_PSGD.shape[3] % 2 or any(step % 2 for step in k_PSGD.stride()[:3]) or scales.k.stride(2) != 1:
        raise KernelInputError(
            f"8-bit pages are read in pairs: {tuple(k_PSGD.shape)}, strides {k_PSGD.stride()}, scales' "
            f"{scales.k.stride()}"
        )


def _check_integers(name: str, x: torch.Tensor, dims: int, q_RHD: torch.Tensor) -> None:
    check_per_request(name, x, dims, q_RHD.shape[0], q_RHD.device)
    if x.dtype != torch.int32:
        raise KernelInputError(f"{name} must be int32, it is {x.dtype}")


def check_per_request(name: str, x: torch.Tensor, dims: int, requests: int, device: torch.device) -> None:
    """Check that x has one contiguous row per request, on `device`. Raises KernelInputError."""
    if x.dim() != dims or x.shape[0] != requests or x.numel() == 0:
        raise KernelInputError(
            f"{name} must have {dims} dimensions, none of them 0 and the first {requests} (requests), "
            f"not {tuple(x.shape)}"
        )
    if x.device != device:
        raise KernelInputError(f"{name} is on {x.device}, the other arguments on {device}")
    if x.stride(-1) != 1:
        raise KernelInputError(f"{name}: the last dimension must be contiguous, stride is {x.stride(-1)}")
