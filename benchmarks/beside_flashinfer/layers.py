"""Pairs of our and FlashInfer's kernels between GEMMs: RMS norm, RoPE with KV write, SiLU. Shape suffixes are
defined in our kernels' files; N: copies of the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deltafront.benchmarks.beside_flashinfer.pairs import CONFIG, Pair, Run, close, copied, copies_of, draw
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.layers.norm import add_norm
from deltafront.kernels.layers.rope import KVRows, rotate_and_store
from deltafront.kernels.layers.swiglu import swiglu

HIDDEN, INTERMEDIATE = 4096, 14_336
Q_HEADS, KV_HEADS, HEAD_DIM = CONFIG.q_heads, CONFIG.kv_heads, CONFIG.head_dim
EPS, THETA = 1e-5, 500_000.0
ROWS = 1, 8, 64, 8192


def norms(flashinfer: Any) -> Iterator[Pair]:
    weight_C = draw(HIDDEN)

    def fused(y_TC: torch.Tensor, x_TC: torch.Tensor) -> Sequence[torch.Tensor]:
        flashinfer.fused_add_rmsnorm(y_TC, x_TC, weight_C, EPS)
        return x_TC, y_TC

    def of(rows: int) -> Iterator[Pair]:
        copies, shape = copies_of(8 * rows * HIDDEN), f"{rows} x {HIDDEN}"
        x_NTC, y_NTC = draw(copies, rows, HIDDEN), draw(copies, rows, HIDDEN)
        yield Pair(
            "RMS norm",
            shape,
            lambda i: add_norm(x_NTC[i], None, weight_C, EPS, fp8=False)[1],
            lambda i: flashinfer.rmsnorm(x_NTC[i], weight_C, EPS),
            copies,
        )
        yield Pair(
            "add, RMS norm",
            shape,
            lambda i: add_norm(x_NTC[i], y_NTC[i], weight_C, EPS, fp8=False),
            lambda i: fused(y_NTC[i], x_NTC[i]),
            copies,
        )

    for rows in ROWS:
        yield from of(rows)


def activations(flashinfer: Any) -> Iterator[Pair]:
    def of(rows: int) -> Pair:
        copies = copies_of(6 * rows * INTERMEDIATE)
        x_NTJ = draw(copies, rows, 2 * INTERMEDIATE)
        ours, theirs = lambda i: swiglu(x_NTJ[i], fp8=False), lambda i: flashinfer.silu_and_mul(x_NTJ[i])
        return Pair("SiLU and multiply", f"{rows} x {INTERMEDIATE}", ours, theirs, copies)

    yield from map(of, ROWS)


@dataclass(frozen=True)
class _Rotation:
    """Tokens to rotate and store. Each request has its own consecutive pages.

    Attributes:
        positions_T: int32, each token's position in its request.
        request_T: int32, each token's request.
    """

    qkv_NTXD: torch.Tensor
    k_PSGD: torch.Tensor
    v_PSGD: torch.Tensor
    positions_T: torch.Tensor
    request_T: torch.Tensor

    @classmethod
    def of(cls, requests: int, first: int, tokens: int) -> _Rotation:
        """Make `tokens` tokens for each request, from position `first` on."""
        total = requests * tokens
        copies = copies_of(2 * total * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM * 2)
        pages = requests * -(-(first + tokens) // PAGE_TOKENS)
        position_T = first + torch.arange(tokens, device=CONFIG.device, dtype=torch.int32).repeat(requests)
        request_T = torch.arange(requests, device=CONFIG.device, dtype=torch.int32).repeat_interleave(tokens)
        return cls(
            draw(copies, total, Q_HEADS + 2 * KV_HEADS, HEAD_DIM),
            draw(pages, PAGE_TOKENS, KV_HEADS, HEAD_DIM),
            draw(pages, PAGE_TOKENS, KV_HEADS, HEAD_DIM),
            position_T,
            request_T,
        )

    @property
    def pages(self) -> int:
        """Number of pages per request."""
        return self.k_PSGD.shape[0] // (int(self.request_T[-1]) + 1)

    def ours(self) -> Run:
        angle_T1F = self.positions_T[:, None, None] * _frequencies()
        cos_T1F, sin_T1F = angle_T1F.cos(), angle_T1F.sin()
        rows_T = self.request_T.long() * (self.pages * PAGE_TOKENS) + self.positions_T
        kv = KVRows(self.k_PSGD.flatten(0, 1), self.v_PSGD.flatten(0, 1), rows_T)
        return lambda i: rotate_and_store(self.qkv_NTXD[i], cos_T1F, sin_T1F, None, kv)

    def theirs(self, flashinfer: Any) -> Run:
        """Return FlashInfer's run: it rotates q and k in place, then appends k and v to their pages."""
        longest = int(self.positions_T.max()) + 1
        angle_PF = torch.arange(longest, device=CONFIG.device)[:, None] * _frequencies()
        table_PD = torch.cat([angle_PF.cos(), angle_PF.sin()], dim=1)
        requests = self.k_PSGD.shape[0] // self.pages
        pages = torch.arange(self.k_PSGD.shape[0], device=CONFIG.device, dtype=torch.int32)
        ends = self.pages * torch.arange(requests + 1, device=CONFIG.device, dtype=torch.int32)
        last = torch.full_like(ends[1:], (longest - 1) % PAGE_TOKENS + 1)
        places = pages, ends, last

        def run(i: int) -> torch.Tensor:
            q_TW, k_TW, v_TW = self._sides(i)
            rotate = flashinfer.apply_rope_with_cos_sin_cache_inplace
            rotate(self.positions_T, q_TW, k_TW, HEAD_DIM, table_PD)
            k_TGD, v_TGD = (x.view(-1, KV_HEADS, HEAD_DIM) for x in (k_TW, v_TW))
            kv = self.k_PSGD, self.v_PSGD
            flashinfer.append_paged_kv_cache(k_TGD, v_TGD, self.request_T, self.positions_T, kv, *places)
            return q_TW.view(-1, Q_HEADS, HEAD_DIM)

        return run

    def _sides(self, i: int) -> Sequence[torch.Tensor]:
        widths = [Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        return torch.split(self.qkv_NTXD[i].flatten(1), widths, dim=1)

    def compare(self, ours: Run, theirs: Run) -> float:
        """Run our kernel and FlashInfer's on the same rows and pages. Return the largest difference in q and
        in all KV cache pages."""
        state = self.qkv_NTXD[0], self.k_PSGD, self.v_PSGD
        before = copied(state)
        mine = [*copied(ours(0)), *copied(state[1:])]
        for x, old in zip(state, before, strict=True):
            x.copy_(old)
        yours = [*copied(theirs(0)), *state[1:]]
        return max(close(x, y) for x, y in zip(mine, yours, strict=True))


def _frequencies() -> torch.Tensor:
    return THETA ** -(torch.arange(HEAD_DIM // 2, device=CONFIG.device) / (HEAD_DIM // 2))


def rotations(flashinfer: Any) -> Iterator[Pair]:
    for requests, first, tokens in ((1, 8191, 1), (8, 8191, 1), (64, 8191, 1), (1, 0, 8192)):
        rotation = _Rotation.of(requests, first, tokens)
        ours, theirs = rotation.ours(), rotation.theirs(flashinfer)
        shape, copies = f"{requests} requests, {tokens} tokens each", rotation.qkv_NTXD.shape[0]
        compare = partial(rotation.compare, ours, theirs)
        yield Pair("RoPE and KV write", shape, ours, theirs, copies, compare)
