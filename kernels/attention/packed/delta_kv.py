"""Delta-KV attends to far keys packed by runs, and exactly to the `critical` tokens before each query block
(DeltaAttention, section 4.1).

Shape suffixes: J keys that a query block attends to.
"""

import torch

from deltafront.kernels.attention.inputs import QueryRows, attend_keys, new_output
from deltafront.kernels.attention.launch import launch
from deltafront.kernels.attention.packed.pack import pack
from deltafront.kernels.attention.packed.runs import PackedRuns, packed_chunks
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask, runs_on_cpu
from deltafront.kernels.options import DeltaKVOptions

CHUNK = 512
"""Tokens of a pack chunk. A run ends with its chunk (DeltaAttention, section 4.1.1)."""


class DeltaKVBackend:
    def __init__(self, options: DeltaKVOptions) -> None:
        self.cos = options.cos
        self.critical = options.critical
        self._means = options.means

    def new_state(self, spec: StateSpec) -> PackedRuns:
        return PackedRuns.empty(spec, CHUNK)

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: PackedRuns, phase: Phase
    ) -> torch.Tensor:
        x.require_aligned("delta_kv")
        state.check(x, "delta_kv")
        with phase("anchors"):
            state.extend(x.k_BGSD, CHUNK, self.cos)
        with phase("attention"):
            attend = cpu_attend if runs_on_cpu(x.q_BHTD, "delta_kv") else kernel_attend
            return attend(x, state, critical=self.critical, means=self._means)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: PackedRuns) -> torch.Tensor:
        row_N = x.first_block + torch.arange(x.query_blocks, device=x.q_BHTD.device)
        chunks_N = (row_N * BLOCK - self.critical).clamp(min=0) // CHUNK
        exact_N = row_N + 1 - chunks_N * (CHUNK // BLOCK)
        packed_BGN = state.offset_BGC.index_select(2, chunks_N)
        batch, heads = x.q_BHTD.shape[:2]
        exact = exact_N.sum(dtype=torch.float64) * (batch * heads)
        return exact + packed_BGN.sum(dtype=torch.float64) * (x.group / BLOCK)


def cpu_pack_head(
    k_SD: torch.Tensor, v_SD: torch.Tensor, start_P: torch.Tensor, end: int, *, means: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack each run of one head into one row.

    Args:
        start_P: First row of each run, its anchor. The runs cover positions 0 .. end - 1.
        means: Pack the mean of a run's rows; otherwise its anchor (DeltaAttention, section 4.1.2).

    Returns:
        keys_PD and values_PD, rounded to the KV cache's dtype, and length_P, all as float32.
    """
    length_P = torch.diff(start_P, append=start_P.new_tensor([end]))
    if not means:
        return k_SD[start_P.long()].float(), v_SD[start_P.long()].float(), length_P.float()
    run_S = torch.repeat_interleave(torch.arange(start_P.numel()), length_P.long())
    zeros_PD = torch.zeros(start_P.numel(), k_SD.shape[1])
    values_PD = (zeros_PD.index_add(0, run_S, v_SD[:end].float()) / length_P[:, None]).to(v_SD.dtype)
    keys_PD = (zeros_PD.index_add(0, run_S, k_SD[:end].float()) / length_P[:, None]).to(k_SD.dtype)
    return keys_PD.float(), values_PD.float(), length_P.float()


def cpu_attend(x: AttentionInput, state: PackedRuns, *, critical: int, means: bool) -> torch.Tensor:
    """Compute attention over packed and exact keys. A packed key that stands for n keys has the softmax
    weight n * exp(s) (equation 4)."""
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype)
    chunks_N = packed_chunks(x.first_block, x.query_blocks, critical, CHUNK)
    for b in range(x.q_BHTD.shape[0]):
        for g in range(x.k_BGSD.shape[1]):
            heads = slice(g * x.group, (g + 1) * x.group)
            offset_C = state.offset_BGC[b, g].tolist()
            start_P, end = state.start_BGP[b, g, : offset_C[chunks_N[-1]]], chunks_N[-1] * CHUNK
            packed = cpu_pack_head(x.k_BGSD[b, g], x.v_BGSD[b, g], start_P, end, means=means)
            for n, done in enumerate(chunks_N):
                rows = slice(n * BLOCK, min((n + 1) * BLOCK, x.q_BHTD.shape[2]))
                kept = tuple(part[: offset_C[done]] for part in packed)
                out = _attend_block(x, b, g, rows, exact_from=done * CHUNK, packed=kept)
                out_BHTD[b, heads, rows] = out.to(out_BHTD.dtype)
    return out_BHTD


def _attend_block(
    x: AttentionInput, b: int, g: int, rows: slice, *, exact_from: int, packed: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    end = x.q_start + rows.stop
    k_JD, v_JD = x.k_BGSD[b, g, exact_from:end], x.v_BGSD[b, g, exact_from:end]
    position_T1 = torch.arange(x.q_start + rows.start, end)[:, None]
    seen = torch.arange(exact_from, end) <= position_T1
    bias_TJ = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    keys_PD, values_PD, length_P = packed
    k_JD, v_JD = torch.cat([keys_PD, k_JD.float()]), torch.cat([values_PD, v_JD.float()])
    bias_TJ = torch.cat([length_P.log().expand(seen.shape[0], -1), bias_TJ], dim=1)
    heads = slice(g * x.group, (g + 1) * x.group)
    return attend_keys(x, heads, x.q_BHTD[b, heads, rows], k_JD, v_JD, bias_TJ)


def kernel_attend(x: AttentionInput, state: PackedRuns, *, critical: int, means: bool) -> torch.Tensor:
    chunks = packed_chunks(x.first_block, x.query_blocks, critical, CHUNK)[-1]
    packed = pack(x, state, chunks=chunks, chunk=CHUNK, critical=critical, means=means)
    out_BHTD = new_output(x)
    launch(x, QueryRows(x.q_BHTD, out_BHTD, x.q_start), packed=packed)
    return out_BHTD
