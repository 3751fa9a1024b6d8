"""The tensor work of a decode worker: append prefill, batched decode steps, sampling, writes of K/V.

Everything but `write` runs on one compute thread. Shape suffixes: R requests of the batch, P columns of
the page table, N pages of one sequence, T tokens of a chunk, H query heads, G key/value heads, D head
dimension, S tokens so far, C hidden size, V vocabulary, B = 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.build import build
from ...kernels.interface import Attention, AttentionInput, StateSpec
from ...kernels.methods import method_spec
from ..kv.cache import PagedKVCache
from ..kv.page_pool import PAGE_TOKENS
from ..messages import Sampling
from ..model.decoder import LayerStack
from .page_selection import BatchRows, LayerPlan, StepAttention
from .sampling import SamplingRows, sample


@dataclass(frozen=True)
class Row:
    """One request in a decode step. `token` is the last chosen one, at position `length`; its K/V is what
    the step adds. key: unique to the request, so that an unchanged batch is recognised."""

    key: int
    pages: tuple[int, ...]
    length: int
    token: int
    sampling: Sampling
    delta: bool


@dataclass(frozen=True)
class Chosen:
    """A row's next token, its log-probability, and the pages that sparse layers read and could have read."""

    token: int
    logprob: float
    pages_attended: int = 0
    pages_held: int = 0


@dataclass
class _Batch:
    """A batch on the device. Only ids_R and lengths_R change from step to step."""

    keys: tuple[int, ...]
    table_RP: torch.Tensor
    lengths_R: torch.Tensor
    ids_R: torch.Tensor
    sampling: SamplingRows
    delta: torch.Tensor | None
    full: torch.Tensor | None
    any_delta: bool


class DecodeCompute:
    """A whole model over one paged cache. On the device nothing is waited for but each step's tokens."""

    def __init__(self, stack: LayerStack, cache: PagedKVCache, plan: LayerPlan) -> None:
        self.stack = stack
        self.cache = cache
        self._plan = plan
        self._scale = stack.config.head_dim**-0.5
        self._dense: Attention = build(method_spec("dense"))
        self._batch: _Batch | None = None
        # Writes have their own stream on a GPU, so that they do not queue behind the steps.
        cuda = stack.device.type == "cuda"
        self._write_stream: Any = torch.cuda.Stream(stack.device) if cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def write(
        self, pages: Sequence[int], start: int, layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Store pulled K/V (k_TGD, v_TGD by layer) from position `start` on; when it returns, every later
        step sees it. Runs on the hand-off thread."""
        with nullcontext() if self._write_stream is None else torch.cuda.stream(self._write_stream):
            self.cache.write_layers(pages, start, layers)
        if self._write_stream is not None:
            self._write_stream.synchronize()

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        self.cache.copy_page(source, target)

    @torch.inference_mode()
    def first_tokens(self, logits: Sequence[object], rows: Sequence[Row]) -> list[Chosen]:
        """Sample each row's token at position `length` from the logits (float32 [V]) before it."""
        rows_V = [torch.as_tensor(np.asarray(x)) if not torch.is_tensor(x) else x for x in logits]
        logits_RV = torch.stack([x.to(self.stack.device, torch.float32) for x in rows_V])
        positions_R = torch.tensor([row.length for row in rows], device=self.stack.device)
        sampling = SamplingRows.of([row.sampling for row in rows], logits_RV.shape[1], self.stack.device)
        return _fetch(*sample(logits_RV, sampling, positions_R))

    @torch.inference_mode()
    def append(self, pages: Sequence[int], start: int, ids: array[int], last: bool) -> torch.Tensor | None:
        """Read tokens start .. start+len-1 over the K/V before them; logits_V of the last one if `last`."""
        device, tokens = self.stack.device, len(ids)
        table_N = torch.tensor(pages, dtype=torch.int64, device=device)
        ids_T = torch.tensor(ids, dtype=torch.int64, device=device)
        positions_T = torch.arange(start, start + tokens, device=device)

        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, table_N, start, k_TGD, v_TGD)
            k_GSD, v_GSD = self.cache.gather(layer, table_N, start + tokens)
            return self._attend_densely(q_THD, k_GSD, v_GSD, start)

        hidden_TC = self.stack.forward(self.stack.embed(ids_T), positions_T, attend)
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
        batch = self._batch_of(rows)
        positions_R = batch.lengths_R
        page_ids_R = batch.table_RP.gather(1, (positions_R // PAGE_TOKENS).to(torch.int64)[:, None])[:, 0]
        slots_R = (positions_R % PAGE_TOKENS).to(torch.int64)
        lengths_R = positions_R + 1
        where = BatchRows(batch.table_RP, lengths_R, batch.delta, batch.full, batch.any_delta)
        step = StepAttention(self._plan, where, self._scale)
        attend = self._step_attend(step, page_ids_R, slots_R)
        hidden_RC = self.stack.forward(self.stack.embed(batch.ids_R), positions_R, attend)
        ids_R, logprob_R = sample(self.stack.logits(hidden_RC), batch.sampling, lengths_R)
        batch.ids_R, batch.lengths_R = ids_R, lengths_R
        return _fetch(ids_R, logprob_R, step.attended_R, step.held_R)

    def _step_attend(
        self, step: StepAttention, page_ids_R: torch.Tensor, slots_R: torch.Tensor
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def attend(layer: int, q_RHD: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> torch.Tensor:
            self.cache.write_rows(layer, page_ids_R, slots_R, k_RGD, v_RGD)
            return step.attend(layer, q_RHD, *self.cache.layer(layer))

        return attend

    def _batch_of(self, rows: Sequence[Row]) -> _Batch:
        """The batch on the device; built anew only when requests came or went."""
        keys = tuple(row.key for row in rows)
        if self._batch is None or self._batch.keys != keys:
            self._batch = self._build(keys, rows)
        return self._batch

    def _build(self, keys: tuple[int, ...], rows: Sequence[Row]) -> _Batch:
        device = self.stack.device
        table = np.zeros((len(rows), max(len(row.pages) for row in rows)), dtype=np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.pages)] = row.pages
        delta = [index for index, row in enumerate(rows) if row.delta]
        full = [index for index, row in enumerate(rows) if not row.delta]
        mixed = bool(delta) and bool(full)
        return _Batch(
            keys=keys,
            table_RP=torch.from_numpy(table).to(device),
            lengths_R=torch.tensor([row.length for row in rows], dtype=torch.int32, device=device),
            ids_R=torch.tensor([row.token for row in rows], dtype=torch.int64, device=device),
            sampling=SamplingRows.of([row.sampling for row in rows], self.stack.config.vocab, device),
            delta=torch.tensor(delta, device=device) if mixed else None,
            full=torch.tensor(full, device=device) if mixed else None,
            any_delta=bool(delta),
        )


def _fetch(
    ids_R: torch.Tensor,
    logprob_R: torch.Tensor,
    attended_R: torch.Tensor | None = None,
    held_R: torch.Tensor | None = None,
) -> list[Chosen]:
    """One copy to the host: float64 holds all of these exactly."""
    none_R = torch.zeros_like(ids_R)
    columns = (
        ids_R,
        logprob_R,
        none_R if attended_R is None else attended_R,
        none_R if held_R is None else held_R,
    )
    table_R4 = torch.stack([column.to(torch.float64) for column in columns], dim=1).tolist()
    return [Chosen(int(token), logprob, int(read), int(held)) for token, logprob, read, held in table_R4]
