"""Cases that time the attention backends, the Δ correction and, to compare, torch's attention.

Sparse cases count the operations of computed tiles: two GEMMs of 2·128·128·D operations per tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from deltafront.benchmarks.harness import BenchConfig, Case, Timed
from deltafront.kernels.anchor_scan import find_anchors
from deltafront.kernels.attention import block_sparse, dense
from deltafront.kernels.attention.inputs import causal_tiles
from deltafront.kernels.attention.packed import delta_kv, delta_xattention, delta_xattention_kernel
from deltafront.kernels.attention.packed.delta_kv import CHUNK, DeltaKVBackend
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.correction import Correction
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileCounts, TileMask, no_phase
from deltafront.kernels.options import DeltaKVOptions
from deltafront.tests.numerics import (
    assert_rows_close,
    chunk_of,
    mask_of,
    poisoned_empty,
    random_input,
    random_mask,
    spec_of,
)
from deltafront.tests.reference.attention import reference_attention
from deltafront.tests.reference.structured import structured_input

DENSITY = 0.085
GAMMA = 64
SMALL = (9, 3, 64)
"""Query heads, key heads and head dimension of SmolLM2, the second shape that is measured."""


def cases(config: BenchConfig) -> list[Case]:
    """List the cases. torch's attention comes first, because other cases report their time relative to
    torch's."""
    shape = (config.q_heads, config.kv_heads, config.head_dim)
    check = partial(_check, config)
    rows = []
    for tokens in (config.tokens, config.tokens // 4, 4096):
        at = partial(_prepare, config, shape, tokens)
        for name, backend in (
            ("sdpa_fa2", SDPBackend.FLASH_ATTENTION),
            ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            rows.append(Case(name, tokens, partial(at, partial(_sdpa, backend))))
        rows.append(Case("dense", tokens, partial(at, _dense), check, over="sdpa_cudnn"))
        rows.append(Case("block_sparse_0.085", tokens, partial(at, _sparse), check, over="dense"))
        rows.append(Case("delta_kv_50", tokens, partial(at, _delta_kv), check, over="dense"))
        rows.append(Case("delta_correction_g64", tokens, partial(at, _correction), check))
    at = partial(_prepare, config, SMALL, config.tokens)
    rows.append(Case("dense_d64", config.tokens, partial(at, _dense), check))
    rows.append(Case("block_sparse_0.085_d64", config.tokens, partial(at, _sparse), check, over="dense_d64"))
    rows.append(Case("delta_kv_50_d64", config.tokens, partial(at, _delta_kv), check, over="dense_d64"))
    uneven = partial(at, _uneven_chunk)
    rows.append(Case("block_sparse_uneven_chunk", config.tokens, uneven, check))
    rows.append(
        Case(
            "block_sparse_0.02",
            4 * config.tokens,
            partial(_prepare, config, shape, 4 * config.tokens, partial(_sparse, density=0.02)),
            check,
        )
    )
    return rows


def _prepare(
    config: BenchConfig, shape: tuple[int, int, int], tokens: int, make: Callable[[AttentionInput], Timed]
) -> Timed:
    return make(config.structured(tokens, *shape))


def _flops(x: AttentionInput, tiles: float) -> float:
    return tiles * 4 * 128 * 128 * x.q_BHTD.shape[3]


def _triangle(x: AttentionInput) -> float:
    """Count the operations of the causal half of the attention matrix, the usual count for attention."""
    batch, heads, rows, dim = x.q_BHTD.shape
    return 2.0 * batch * heads * rows * rows * dim


def _sdpa(backend: SDPBackend, x: AttentionInput) -> Timed:
    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(x.q_BHTD, x.k_BGSD, x.v_BGSD, is_causal=True, enable_gqa=True)

    return Timed(run, _triangle(x), 1.0)


def _dense(x: AttentionInput) -> Timed:
    return Timed(partial(dense.kernel_attend, x), _triangle(x), 1.0)


def _sparse(x: AttentionInput, density: float = DENSITY) -> Timed:
    """Time block-sparse attention over random tiles, which reuse L2 least. `density` includes the diagonal
    and sink tiles."""
    rows = x.query_blocks
    always = 2 * rows / (rows * (rows + 1) / 2)
    mask = random_mask(x, max(0.0, (density - always) / (1 - always)))
    tiles = float(mask.count_BHN.sum())
    return Timed(partial(block_sparse.kernel_attend, x, mask), _flops(x, tiles), tiles / causal_tiles(x))


def _uneven_chunk(x: AttentionInput) -> Timed:
    """Time the prompt's last eighth as one chunk. Heads have densities from 0.05 to 0.9, as in models."""
    keys, heads = x.k_BGSD.shape[2], x.q_BHTD.shape[1]
    part = chunk_of(x, keys - keys // 8, keys)
    share_H11 = torch.linspace(0.05**0.5, 0.9**0.5, heads, device=x.q_BHTD.device).square()[:, None, None]
    generator = torch.Generator(x.q_BHTD.device).manual_seed(1)
    shape = (heads, part.query_blocks, part.key_blocks)
    keep_HNM = torch.rand(shape, generator=generator, device=x.q_BHTD.device) < share_H11
    mask = mask_of(part, keep_HNM)
    tiles = float(mask.count_BHN.sum())
    note = "one chunk, heads of 0.05 to 0.9"
    return Timed(
        partial(block_sparse.kernel_attend, part, mask), _flops(part, tiles), tiles / causal_tiles(part), note
    )


def _delta_kv(x: AttentionInput) -> Timed:
    """Time all parts of delta_kv: the scan for anchors, packing and attention."""
    cos = _halving_cosine(x)
    backend = DeltaKVBackend(DeltaKVOptions(cos=cos, critical=512))
    spec = spec_of(x)

    def run() -> PackedRuns:
        state = backend.new_state(spec)
        backend.attend(x, None, state, no_phase)
        return state

    state = run()
    tiles = float(backend.computed_tiles(x, None, state))
    kept = float(state.offset_BGC[:, :, -1].double().mean()) / (state.chunks * CHUNK)
    return Timed(
        run, _flops(x, tiles), tiles / causal_tiles(x), f"cos {cos:.3f} keeps {kept:.3f} of the keys"
    )


def _halving_cosine(x: AttentionInput) -> float:
    """Find the cosine at which half of the keys are anchors, by bisection on the first 16,384 keys."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        share = float(
            find_anchors(x.k_BGSD[:, :, :16_384], middle, min(CHUNK, x.k_BGSD.shape[2])).double().mean()
        )
        low, high = (low, middle) if share > 0.5 else (middle, high)
    return low


class _Given:
    """A method that returns a given output, so that only the correction is timed."""

    def __init__(self, out_BHTD: torch.Tensor) -> None:
        self.out_BHTD = out_BHTD

    def new_state(self, spec: StateSpec) -> None:
        del spec

    def attend(
        self, x: AttentionInput, state: None, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]:
        del state, phase
        return self.out_BHTD, TileCounts(torch.zeros((), device=x.q_BHTD.device), causal_tiles(x), 0.0)


def _correction(x: AttentionInput) -> Timed:
    method = Correction(_Given(torch.zeros_like(x.q_BHTD)), GAMMA)
    state = method.new_state(spec_of(x))
    extra = float(method.attend(x, state)[1].computed)
    run = partial(method.attend, x, state)
    return Timed(run, _flops(x, extra), extra / causal_tiles(x), "dense rows, their tail and the addition")


def _check(config: BenchConfig) -> None:
    """Compare every kernel timed here, in the timed dtype, with an oracle or CPU version. Inputs include a
    length that is no multiple of 128, and a chunk."""
    shapes = ((8, 2, config.head_dim), SMALL)
    for seed, (heads, key_heads, dim) in enumerate(shapes):
        made: dict[str, Any] = {
            "q_heads": heads,
            "kv_heads": key_heads,
            "head_dim": dim,
            "seed": config.seed + 7 + seed,
        }
        device = str(config.device)
        whole = structured_input(4096, dtype=config.dtype, device=device, **made)
        ragged = random_input(5000, dtype=config.dtype, device=device, **made)
        for x in (whole, ragged, chunk_of(ragged, 4096, 5000)):
            _check_input(x)


def _check_input(x: AttentionInput) -> None:
    expected = _by_head(x, None)
    mask = random_mask(x, 0.2)
    exact = delta_xattention_kernel.kernel_exact_table(mask, 0.3)
    with poisoned_empty():
        assert_rows_close(dense.kernel_attend(x), expected)
        assert_rows_close(block_sparse.kernel_attend(x, mask), _by_head(x, mask))
        packed_kv_state, tile_state = _states(x, CHUNK), _states(x, 128)
        found = delta_kv.kernel_attend(x, packed_kv_state, critical=512, means=True)
        mixed = delta_xattention_kernel.kernel_attend(x, mask, tile_state, exact, means=True)
    y = AttentionInput.of(*(t.cpu() for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)), q_start=x.q_start)
    on_cpu = TileMask(*(t.cpu() for t in (mask.index_BHNM, mask.count_BHN, mask.score_BHNM) if t is not None))
    wanted = delta_kv.cpu_attend(y, _moved(packed_kv_state), critical=512, means=True)
    assert_rows_close(found.cpu(), wanted)
    wanted = delta_xattention.cpu_attend(y, on_cpu, _moved(tile_state), exact.cpu(), means=True)
    assert_rows_close(mixed.cpu(), wanted)
    if x.q_start == 0:
        _check_correction(x, expected)


def _check_correction(x: AttentionInput, expected: torch.Tensor) -> None:
    """Apply the Δ correction to a sparse output of zeros. Each row must become the output of the dense row at
    or before it; rows of the tail must be dense."""
    given = Correction(_Given(torch.zeros_like(x.q_BHTD)), GAMMA)
    found = given.attend(x, given.new_state(spec_of(x)))[0]
    tail = (x.prompt_tokens // 128 - 1) * 128
    row_T = torch.arange(tail, device=found.device)
    assert_rows_close(found[:, :, :tail], expected[:, :, row_T // GAMMA * GAMMA])
    assert_rows_close(found[:, :, tail:], expected[:, :, tail:])


def _states(x: AttentionInput, chunk: int) -> PackedRuns:
    state = PackedRuns.empty(spec_of(x), chunk)
    state.extend(x.k_BGSD, chunk, 0.8)
    return state


def _moved(state: PackedRuns) -> PackedRuns:
    return PackedRuns(state.start_BGP.cpu(), state.offset_BGC.cpu(), state.max_tokens, state.chunks)


def _by_head(x: AttentionInput, mask: TileMask | None) -> torch.Tensor:
    """Compute `reference_attention` one head at a time, to limit the memory of the score matrix."""
    parts = []
    for h in range(x.q_BHTD.shape[1]):
        g = h // x.group
        one = AttentionInput.of(
            x.q_BHTD[:, h : h + 1], x.k_BGSD[:, g : g + 1], x.v_BGSD[:, g : g + 1], q_start=x.q_start
        )
        parts.append(reference_attention(one, None if mask is None else _table(x, mask)[:, h : h + 1]))
    return torch.cat(parts, dim=1)


def _table(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    """Convert the mask to booleans (B, H, N, M)."""
    listed = torch.arange(mask.index_BHNM.shape[3], device=x.q_BHTD.device) < mask.count_BHN[..., None]
    place = torch.where(listed, mask.index_BHNM.long(), x.key_blocks)
    table = torch.zeros(*place.shape[:3], x.key_blocks + 1, dtype=torch.bool, device=place.device)
    return table.scatter_(3, place, True)[..., :-1]
