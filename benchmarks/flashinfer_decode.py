"""FlashInfer's paged decode, the baseline of the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.paged_decode.pages import PagedInput

_WORKSPACE_BYTES = 256 << 20


class FlashInferUnavailable(RuntimeError):
    """FlashInfer is not installed: `pip install 'deltafront[gpu]'`, or use `paged_attention`."""


class FlashInferDecode:
    """Plain decode over lengths fixed by `plan`; then fit for a CUDA graph."""

    def __init__(self, x: PagedInput) -> None:
        try:
            import flashinfer
        except ImportError as error:
            raise FlashInferUnavailable(str(FlashInferUnavailable.__doc__)) from error
        if not x.q_RHD.is_cuda:
            raise KernelInputError("FlashInfer runs on CUDA devices only: use paged_attention on the CPU")
        device, (requests, columns) = x.q_RHD.device, x.table_RP.shape

        def buffer(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self._x = x
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(requests + 1),
            paged_kv_indices_buffer=buffer(requests * columns),
            paged_kv_last_page_len_buffer=buffer(requests),
        )

    def plan(self, lengths: Sequence[int]) -> None:
        """Divide the work for these lengths, on the host (0.2-0.5 ms)."""
        x = self._x
        pages = [-(-tokens // PAGE_TOKENS) for tokens in lengths]
        ids = torch.cat([row[:held] for row, held in zip(x.table_RP, pages, strict=True)])
        ends = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        filled = [tokens - PAGE_TOKENS * (held - 1) for tokens, held in zip(lengths, pages, strict=True)]
        self._wrapper.plan(
            ends,
            ids,
            torch.tensor(filled, dtype=torch.int32),
            x.q_RHD.shape[1],
            x.k_PSGD.shape[2],
            x.q_RHD.shape[2],
            PAGE_TOKENS,
            sm_scale=x.scale,
            q_data_type=x.q_RHD.dtype,
            kv_data_type=x.k_PSGD.dtype,
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out_RHD and lse_RH, with the LSE turned from base 2 to e."""
        x = self._x
        out_RHD, lse_RH = self._wrapper.run(x.q_RHD, (x.k_PSGD, x.v_PSGD), return_lse=True)
        return out_RHD, lse_RH * math.log(2)

    def run_plain(self) -> torch.Tensor:
        """out_RHD alone."""
        out_RHD: torch.Tensor = self._wrapper.run(self._x.q_RHD, (self._x.k_PSGD, self._x.v_PSGD))
        return out_RHD
