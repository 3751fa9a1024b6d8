"""A chunk's attention in each layer of a stage: K/V into the prompt's pages, hand-off, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....kernels.interface import Attention, AttentionInput, StateSpec
from ....kernels.layers.rope import KVRows
from ...kv.cache import PagedKVCache
from ...kv.handoff.protocols import KVStream
from ...messages.methods import resume_step
from ...messages.stages import OpenRequest, RequestFailed
from .chunk import ChunkWork


@dataclass(kw_only=True)
class OpenPrompt:
    """states: what its method remembers of each layer whose queries it has all seen. first_page: of pages_N
    if they are contiguous, else None."""

    request: OpenRequest
    method: Attention
    stream: KVStream
    spec: StateSpec
    states: dict[int, Any]
    pages_N: torch.Tensor
    first_page: int | None


class ChunkAttention:
    """A `LayerAttention` of one chunk. last_layer: the model's."""

    def __init__(
        self,
        prompt: OpenPrompt,
        work: ChunkWork,
        cache: PagedKVCache,
        last_layer: int,
        abandoned: Callable[[], bool],
    ) -> None:
        self._prompt, self._work, self._cache = prompt, work, cache
        self._last_layer, self._abandoned = last_layer, abandoned
        self._start = work.command.start
        self._end = work.command.start + work.command.tokens
        with work.timer.phase("projection"):
            self._rows_T = self._rows(work.command.tokens)

    def kv_rows(self, layer: int) -> KVRows:
        """Raises RequestFailed for an abandoned request."""
        if self._abandoned():
            raise RequestFailed(f"request {self._prompt.request.request_id} was abandoned")
        return KVRows(*self._cache.rows(layer), self._rows_T)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        work, prompt, phase = self._work, self._prompt, self._work.timer.phase
        with phase("kv_gather"):
            k_GSD, v_GSD = self._context(layer)
        with phase("handoff"):  # before attention, so that K/V travels meanwhile
            chunk = k_GSD[:, self._start :].transpose(0, 1), v_GSD[:, self._start :].transpose(0, 1)
            work.handoff_bytes += prompt.stream.put(layer, self._start, *chunk)
        first = self._first_needed(layer)
        if first > self._start:
            with phase("projection"):
                work.finite = finite(k_GSD[:, self._start :]) & finite(v_GSD[:, self._start :])
            prompt.states.pop(layer, None)
        if first == self._end:
            return None
        x = AttentionInput.of(
            q_THD[first - self._start :].transpose(0, 1)[None],
            k_GSD[None],
            v_GSD[None],
            q_start=first,
            prompt_tokens=prompt.request.prompt_tokens,
        )
        work.timer.layer = layer
        if layer not in prompt.states:
            prompt.states[layer] = prompt.method.new_state(replace(prompt.spec, layer=layer))
        out_BHTD, coverage = prompt.method.attend(x, prompt.states[layer], phase)
        work.timer.layer = None
        work.coverage.append((layer, coverage))
        return out_BHTD[0].transpose(0, 1)

    def _first_needed(self, layer: int) -> int:
        """Return the first position whose attention is needed; the chunk's end if none is.

        The last layer's attention is needed only for logits. It begins at the last block before them where
        the method, which has seen no earlier queries, can begin.
        """
        command = self._work.command
        if layer != self._last_layer or not (step := resume_step(self._prompt.request.method)):
            return self._start
        needed = self._end - 1 if command.last and command.wants_logits else self._end
        return max(self._start, needed // step * step)

    def _rows(self, tokens: int) -> torch.Tensor:
        if self._prompt.first_page is None:
            return self._cache.rows_of(self._prompt.pages_N, self._start, tokens)
        return self._cache.rows_of_run(self._prompt.first_page, self._start, tokens)

    def _context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prompt.first_page is None:
            return self._cache.gather(layer, self._prompt.pages_N, self._end)
        return self._cache.view_run(layer, self._prompt.first_page, self._end)


def finite(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor, so that nothing waits for the device."""
    return torch.isfinite(x).all()
