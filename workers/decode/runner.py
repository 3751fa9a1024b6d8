"""The tensor work of a decode worker: append prefill, first tokens, batched decode steps.

Everything runs on one compute thread. What a step reads lies at addresses that never change (`StepRows`, the
pages, the weights), and the step itself depends on shapes and host flags alone, so that a CUDA graph could
hold it.

Shape suffixes: R requests of the batch, P columns of the page table, N pages of one sequence, T tokens of a
chunk, H query heads, G key/value heads, D head dimension, S tokens so far, C hidden size, V vocabulary,
B = 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.build import build
from ...kernels.interface import Attention, AttentionInput, StateSpec
from ...kernels.layers.rope import KVRows
from ...kernels.methods import method_spec
from ..kv.cache import PagedKVCache
from ..kv.page_pool import PAGE_TOKENS, pages_for
from ..messages.requests import Sampling
from ..model.decoder import LayerStack
from .page_selection import BatchRows, LayerPlan, StepAttention
from .sampling import SamplingRows, sample
from .sessions import PageCopy

_RAGGED = 77
"""Tokens of a warm-up's appended text: no multiple of anything that a kernel might be specialised for."""


@dataclass(frozen=True)
class Row:
    """One request in a decode step. `token` is the last chosen one, at position `length`; its K/V is what
    the step adds. key: unique to the request, so that an unchanged row is recognised."""

    key: int
    pages: tuple[int, ...]
    length: int
    token: int
    sampling: Sampling
    selects_pages: bool


@dataclass(frozen=True)
class Chosen:
    """A row's next token, its log-probability, and the pages that sparse layers read and could have read."""

    token: int
    logprob: float
    pages_attended: int = 0
    pages_held: int = 0


@dataclass(frozen=True)
class Batch:
    """The first rows of `StepRows`, as a step sees them: slices, and what the host knows of them."""

    table_RP: torch.Tensor
    lengths_R: torch.Tensor
    ids_R: torch.Tensor
    sampling: SamplingRows
    selecting: torch.Tensor | None
    full: torch.Tensor | None
    any_selects: bool


class StepRows:
    """What a decode step reads of each row, on the device, in memory that is allocated once.

    Rows are written in place when requests come or go; from step to step a step itself moves ids and lengths
    on. The table's width is cut to a power of two, so that shapes are few. What nobody wrote names the
    scratch page.
    """

    def __init__(self, rows: int, pages: int, vocab: int, scratch_page: int, device: torch.device) -> None:
        self._vocab = vocab
        self._scratch_page = scratch_page
        shape = (rows, _width(pages))
        self.table_RP = torch.full(shape, scratch_page, dtype=torch.int32, device=device)
        self.lengths_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ids_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sampling = SamplingRows.room(rows, device)
        self.selecting = torch.zeros(rows, dtype=torch.int64, device=device)
        self.full = torch.zeros(rows, dtype=torch.int64, device=device)
        self._keys: tuple[int, ...] = ()
        self._batch: Batch | None = None

    def batch(self, rows: Sequence[Row]) -> Batch:
        """These rows, in this order: written anew from the first on that is another than in the step before.
        Those before it have moved on with the steps."""
        keys = tuple(row.key for row in rows)
        if self._batch is None or keys != self._keys:
            same = 0
            while same < min(len(keys), len(self._keys)) and keys[same] == self._keys[same]:
                same += 1
            self._keys = ()  # if writing fails, nothing counts as written
            self._write(same, rows[same:])
            self._batch, self._keys = self._view(rows), keys
        return self._batch

    def _write(self, first: int, rows: Sequence[Row]) -> None:
        if not rows:
            return
        end = first + len(rows)
        table = np.full((len(rows), self.table_RP.shape[1]), self._scratch_page, dtype=np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.pages)] = row.pages
        self.table_RP[first:end].copy_(torch.from_numpy(table))
        self.lengths_R[first:end].copy_(torch.tensor([row.length for row in rows], dtype=torch.int32))
        self.ids_R[first:end].copy_(torch.tensor([row.token for row in rows]))
        self.sampling.write(first, [row.sampling for row in rows], self._vocab)

    def _view(self, rows: Sequence[Row]) -> Batch:
        selecting = [index for index, row in enumerate(rows) if row.selects_pages]
        full = [index for index, row in enumerate(rows) if not row.selects_pages]
        mixed = bool(selecting) and bool(full)
        for target, indices in ((self.selecting, selecting), (self.full, full)):
            target[: len(indices)].copy_(torch.tensor(indices, dtype=torch.int64))
        return Batch(
            self.table_RP[: len(rows), : _width(max(len(row.pages) for row in rows))],
            self.lengths_R[: len(rows)],
            self.ids_R[: len(rows)],
            self.sampling.view([row.sampling for row in rows], self._vocab),
            self.selecting[: len(selecting)] if mixed else None,
            self.full[: len(full)] if mixed else None,
            bool(selecting),
        )


class DecodeRunner:
    """A whole model over `pages` pages of K/V. On the device nothing is waited for but each step's tokens.

    max_batch: rows of a step, max_pages: pages of a request, at most. scratch_page: one page more, which
    belongs to nobody: the pool hands out 0 .. pages - 1. What is computed for no request goes there.
    """

    def __init__(
        self, stack: LayerStack, plan: LayerPlan, *, pages: int, max_batch: int, max_pages: int
    ) -> None:
        model = stack.config
        self.stack = stack
        self.max_batch = max_batch
        self.scratch_page = pages
        self.cache = PagedKVCache(
            range(model.layers), model.kv_heads, model.head_dim, pages + 1, stack.dtype, stack.device
        )
        self.rows = StepRows(max_batch, max_pages, model.vocab, self.scratch_page, stack.device)
        self._plan = plan
        self._scale = model.head_dim**-0.5
        self._dense: Attention = build(method_spec("dense"))

    @torch.inference_mode()
    def first_tokens(
        self, logits: Sequence[object], rows: Sequence[Row], copies: Sequence[PageCopy] = ()
    ) -> list[Chosen]:
        """Sample each row's token at position `length` from the logits (float32 [V]) before it. When this
        returns, the pages of `copies` are copied too."""
        for source, target in copies:
            self.cache.copy_page(source, target)
        rows_V = [torch.as_tensor(np.asarray(x)) if not torch.is_tensor(x) else x for x in logits]
        logits_RV = torch.stack([x.to(self.stack.device, torch.float32) for x in rows_V])
        positions_R = torch.tensor([row.length for row in rows], device=self.stack.device)
        sampling = SamplingRows.of([row.sampling for row in rows], logits_RV.shape[1], self.stack.device)
        ids_R, logprob_R = sample(logits_RV, sampling, positions_R)
        none_R = torch.zeros_like(ids_R)
        return _fetch(_columns(ids_R, logprob_R, none_R, none_R))

    @torch.inference_mode()
    def append(
        self, pages: Sequence[int], start: int, ids: array[int], last: bool, copy: PageCopy | None = None
    ) -> torch.Tensor | None:
        """Read tokens start .. start+len-1 over the K/V before them; logits_V of the last one if `last`.
        copy: pages to be copied before that."""
        cache, device, tokens = self.cache, self.stack.device, len(ids)
        if copy is not None:
            self.cache.copy_page(*copy)
        table_N = torch.tensor(pages, dtype=torch.int64, device=device)
        ids_T = torch.tensor(ids, dtype=torch.int64, device=device)
        positions_T = torch.arange(start, start + tokens, device=device)
        rows_T = cache.rows_of(table_N, start, tokens)

        def keep(layer: int) -> KVRows:
            return KVRows(*cache.rows(layer), rows_T)

        def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            return self._attend_densely(q_THD, *cache.gather(layer, table_N, start + tokens), start)

        hidden_TC = self.stack.forward_stored(self.stack.embed(ids_T), positions_T, keep, attend)
        logits_V = self.stack.logits(hidden_TC[-1:])[0] if last else None
        if device.type == "cuda":  # its pages may be given away once this returns
            torch.cuda.current_stream(device).synchronize()
        return logits_V

    def _attend_densely(
        self, q_THD: torch.Tensor, k_GSD: torch.Tensor, v_GSD: torch.Tensor, start: int
    ) -> torch.Tensor:
        q_BHTD = q_THD.transpose(0, 1)[None].to(k_GSD.dtype)
        x = AttentionInput.of(q_BHTD, k_GSD[None], v_GSD[None], q_start=start)
        config = self.stack.config
        keys = k_GSD.shape[1]
        spec = StateSpec(1, config.q_heads, config.kv_heads, config.head_dim, keys, k_GSD.device, k_GSD.dtype)
        out_BHTD, _coverage = self._dense.attend(x, self._dense.new_state(spec))
        return out_BHTD[0].transpose(0, 1).to(q_THD.dtype)

    @torch.inference_mode()
    def decode(self, rows: Sequence[Row]) -> list[Chosen]:
        """One step: every row's next token. Rows do not influence each other."""
        return _fetch(self._step(self.rows.batch(rows)))

    def _step(self, batch: Batch) -> torch.Tensor:
        """What `_fetch` reads. The batch's ids and lengths move on in place, at the very end."""
        positions_R = batch.lengths_R
        page_ids_R = batch.table_RP.gather(1, (positions_R // PAGE_TOKENS).to(torch.int64)[:, None])[:, 0]
        rows_R = page_ids_R.to(torch.int64) * PAGE_TOKENS + positions_R % PAGE_TOKENS
        lengths_R = positions_R + 1
        where = BatchRows(batch.table_RP, lengths_R, batch.selecting, batch.full, batch.any_selects)
        step = StepAttention(self._plan, where, self._scale)

        def keep(layer: int) -> KVRows:
            return KVRows(*self.cache.rows(layer), rows_R)

        def attend(layer: int, q_RHD: torch.Tensor) -> torch.Tensor:
            return step.attend(layer, q_RHD, *self.cache.layer(layer))

        hidden_RC = self.stack.forward_stored(self.stack.embed(batch.ids_R), positions_R, keep, attend)
        ids_R, logprob_R = sample(self.stack.logits(hidden_RC), batch.sampling, lengths_R)
        batch.ids_R.copy_(ids_R)
        batch.lengths_R.copy_(lengths_R)
        return _columns(ids_R, logprob_R, step.attended_R, step.held_R)


def warm_up(runner: DecodeRunner, tokens: int, selects_pages: bool) -> None:
    """Run what a GPU compiles at first use: append and decode at few and at `tokens` tokens, alone and in a
    batch, greedy and sampled. No request exists yet, and results are dropped.

    Every page table names the scratch page only, which is left with finite numbers. selects_pages: whether
    the worker has Δ-layers.
    """
    sampled = Sampling(temperature=1.0, top_p=0.9, top_k=50)
    batches = [(False,), (True,), (True, False)] if selects_pages else [(False,), (False, False)]
    key = 0
    longest = tokens - _RAGGED - 2  # two steps follow
    for length in sorted({min(100, longest), longest}):
        pages = (runner.scratch_page,) * pages_for(length + _RAGGED + 2)
        logits_V = runner.append(pages, length, array("I", [0] * _RAGGED), last=True)
        for batch in batches:
            rows = []
            for selects, sampling in zip(batch[: runner.max_batch], (Sampling(), sampled), strict=False):
                key -= 1  # requests count upwards
                rows.append(Row(key, pages, length + _RAGGED, 0, sampling, selects))
            runner.first_tokens([logits_V] * len(rows), rows)
            runner.decode(rows)
            runner.decode(rows)


def _width(pages: int) -> int:
    """Columns of a table for so many pages: a power of two, at least 16."""
    return max(16, 1 << (pages - 1).bit_length())


def _columns(*columns_R: torch.Tensor) -> torch.Tensor:
    """One tensor for one copy to the host: float64 holds all of these exactly."""
    return torch.stack([column_R.to(torch.float64) for column_R in columns_R], dim=1)


def _fetch(table_R4: torch.Tensor) -> list[Chosen]:
    """Token, log-probability, pages read and pages held of each row. Waits for the device."""
    return [
        Chosen(int(token), logprob, int(read), int(held)) for token, logprob, read, held in table_R4.tolist()
    ]
