"""Runs one chunk's attention on one stage.

In each layer, `ChunkAttention` gives the rows of the KV cache to write to, sends the KV to the decode worker
and computes attention. `ChunkWork` collects the chunk's results and counters. `batch.py` runs several chunks
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deltafront.kernels.attention.inputs import tiles_of_blocks
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.gated_delta.states import RowStates, SequenceStates
from deltafront.kernels.interface import Attention, AttentionInput, StateSpec, TileCounts
from deltafront.kernels.layers.rope import KVRows
from deltafront.kernels.methods import resume_step
from deltafront.workers.kv.cache import PagedKVCache, Sides
from deltafront.workers.kv.handoff.protocols import KVStream
from deltafront.workers.kv.rolling_buffers import RollingBuffers, SequenceBuffers
from deltafront.workers.kv.states import LinearStates, State, StateCache
from deltafront.workers.messages.events import LayerDensity
from deltafront.workers.messages.stages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed
from deltafront.workers.prefill.stage.phases import PhaseTimer


@dataclass(kw_only=True)
class ChunkWork:
    """Collects one chunk's results and counters.

    `seal` launches the copies of results to the host. After `wait` any thread may read them, while the device
    computes the next chunk.

    Attributes:
        timer: Times the whole batch.
        fetch_s: Seconds for which this chunk waited for KV of earlier tokens from the decode worker.
        failure: The reason why the chunk failed; None if it has not.
        stream: The prompt's KV stream, once the chunk has begun. `sent` completes the hand-off of the chunk's
            KV.
    """

    command: ChunkCommand
    timer: PhaseTimer
    fetch_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    tile_counts: list[tuple[int, TileCounts]] = field(default_factory=list)
    handoff_bytes: int = 0
    finite: torch.Tensor | None = None
    states: list[tuple[int, State | None]] = field(default_factory=list)
    """The results of `KVStream.copy_state`, with the numbers of tokens before each state."""
    logits_V: torch.Tensor | None = None
    """Logits (float32) after the prompt's last token; None if they are not needed."""
    failure: RequestFailed | None = None
    stream: KVStream | None = None
    sent: Callable[[], None] | None = None
    launched: float = 0.0
    through: float = 0.0
    """perf_counter times at which the host had launched the whole chunk, and the device had finished it."""
    _computed_L: torch.Tensor | None = None
    _sealed: Any = None

    def seal(self) -> None:
        """Launch the copies of results to the host. Call it after the last phase, on the launching thread."""
        if self.tile_counts:
            self._computed_L = _to_host(
                torch.stack([c.computed for _, c in self.tile_counts]).to(torch.float64)
            )
        self.finite, self.logits_V = _to_host(self.finite), _to_host(self.logits_V)
        self._sealed = self.timer.mark()
        self.launched = time.perf_counter()

    def wait(self) -> None:
        if self._sealed is not None:
            self._sealed.synchronize()
        self.through = time.perf_counter()

    def report(self, stage: int, times: BatchTimes) -> ChunkReport:
        """Make the report, after `wait`. Each chunk gets a share of its batch's seconds, by tokens."""
        share = self.command.tokens / times.tokens
        phases = {name: share * seconds for name, seconds in times.phases.items()}
        if self.fetch_s:
            phases["kv_fetch"] = self.fetch_s
        return ChunkReport(
            request_id=self.command.request_id,
            stage=stage,
            start=self.command.start,
            wall=share * times.wall + self.fetch_s,
            phases=phases,
            density=self._density(share, times.layers),
            sampled_share=sum(c.scored_share for _, c in self.tile_counts) / max(1, len(self.tile_counts)),
            handoff_bytes=self.handoff_bytes,
            launched_ahead=None if self._sealed is None else share * (self.through - self.launched),
        )

    def _density(self, share: float, seconds: Mapping[int, Mapping[str, float]]) -> tuple[LayerDensity, ...]:
        if self._computed_L is None:
            return ()
        densities = []
        for (layer, counts), tiles in zip(self.tile_counts, self._computed_L.tolist(), strict=True):
            parts = seconds.get(layer, {})
            attention, causal = parts.get("attention", 0.0), float(counts.causal)
            choosing = share * (sum(parts.values()) - attention)
            times = {"attention": share * attention, "choosing": choosing}
            densities.append(LayerDensity(layer=layer, computed=tiles, causal=causal, **times))
        return tuple(densities)


@dataclass(frozen=True)
class BatchTimes:
    """The times of a batch of chunks.

    Attributes:
        tokens: Tokens of all chunks.
        wall: Seconds from the batch's start to its end.
        phases, layers: `PhaseTimer.seconds` and `PhaseTimer.layers`.
    """

    tokens: int
    wall: float
    phases: Mapping[str, float]
    layers: Mapping[int, Mapping[str, float]]

    @classmethod
    def of(cls, works: Sequence[ChunkWork], after: float) -> BatchTimes:
        """Collect the times after `ChunkWork.wait` of all chunks. `after` is the time at which the device
        finished the previous batch; this batch's time counts from then at the earliest."""
        phases, first, last = works[0].timer.seconds(), works[0], works[-1]
        wall = max(last.through - max(first.began, after), sum(phases.values()))
        return cls(sum(work.command.tokens for work in works), wall, phases, first.timer.layers())


@dataclass(kw_only=True)
class OpenPrompt:
    """A prompt in prefill on this stage.

    Attributes:
        states: The attention method's state between chunks, by layer. A layer's state is removed when the
            layer skips queries.
        first_page: The first of pages_N if the pages are contiguous, else None.
        fetch_s: As in `ChunkWork`.
        live: The state after the last launched chunk, in slot 0; None: no layer of the stage has a state.
    """

    request: OpenRequest
    method: Attention
    stream: KVStream
    spec: StateSpec
    states: dict[int, Any]
    pages_N: torch.Tensor
    first_page: int | None
    fetch_s: float = 0.0
    live: StateCache | None = None


class ChunkAttention:
    """Computes one chunk's attention in each layer (`LayerAttention`).

    Args:
        last_layer: Index of the model's last layer.
        sinks: `LayerStack.sinks`.

    Attributes:
        rows_T: Rows of the KV cache that the chunk's tokens are written to.
    """

    def __init__(
        self,
        prompt: OpenPrompt,
        work: ChunkWork,
        cache: PagedKVCache,
        last_layer: int,
        abandoned: Callable[[], bool],
        sinks: Callable[[int], torch.Tensor | None],
    ) -> None:
        self.prompt, self.work, self._cache = prompt, work, cache
        self._last_layer, self._abandoned, self._sinks = last_layer, abandoned, sinks
        self._start = work.command.start
        self._end = work.command.start + work.command.tokens
        with work.timer.phase("projection"):
            self.rows_T = self._rows(self._start, work.command.tokens)
            self._seen_S = self._rows(0, self._end) if cache.int8 else None
            """Rows of all tokens so far, if 8-bit KV must be dequantised to the model's dtype."""
            self._places = tuple(p for p in prompt.request.state_places if self._start < p <= self._end)
            self._buffers: SequenceBuffers | None = None
            """The KV of the layers with rolling buffers."""
            if prompt.live is not None:
                prompt.live = prompt.live.with_slots(1 + len(self._places))
            if isinstance(prompt.live, RollingBuffers):
                cuts = [(self._end, 0), *((place, slot) for slot, place in enumerate(self._places, start=1))]
                first = 0 if self._start else None
                self._buffers = SequenceBuffers(prompt.live, self._start, self._end, first, cuts)

    def _rows(self, start: int, tokens: int) -> torch.Tensor:
        if self.prompt.first_page is None:
            return self._cache.rows_of(self.prompt.pages_N, start, tokens)
        return self._cache.rows_of_run(self.prompt.first_page, start, tokens)

    @property
    def tokens(self) -> int:
        return self._end - self._start

    def kv_rows(self, layer: int) -> KVRows:
        """Return the rows to write the chunk's KV to. Raises RequestFailed if the request ended."""
        self.check_wanted()
        if self._buffers is not None and self._buffers.has(layer):
            return self._buffers.kv_rows(layer)
        return self._cache.kv_rows(layer, self.rows_T)

    def check_wanted(self) -> None:
        """Raise RequestFailed if the request ended."""
        if self._abandoned():
            raise RequestFailed(f"request {self.prompt.request.request_id} was abandoned")

    def row_states(self, layer: int) -> RowStates:
        """Return where the layer's state is: slot 0, and a slot for each of the chunk's state places. Raises
        RequestFailed if the request ended."""
        self.check_wanted()
        assert isinstance(self.prompt.live, LinearStates), "only linear-attention layers ask"
        cuts = [(place - self._start, slot) for slot, place in enumerate(self._places, start=1)]
        whole = (self._end - self._start, 0)
        return SequenceStates(self.prompt.live.layer(layer), 0, (*cuts, whole))

    def copy_states(self) -> None:
        """Launch the copies of the states that the decode worker needs. Call it after the last layer."""
        if self.prompt.live is not None:
            copy = self.prompt.stream.copy_state
            for slot, place in enumerate(self._places, start=1):
                self.work.states.append((place, copy(place, self.prompt.live, slot)))

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        work, prompt, phase = self.work, self.prompt, self.work.timer.phase
        if self._buffers is not None and self._buffers.has(layer):
            return self._attend_to_window(layer, q_THD, self._buffers)
        with phase("kv_gather"):
            k_GSD, v_GSD = self._context(layer)
        with phase("handoff"):  # before attention, so that the transfer overlaps it
            sides_T = self._chunk(layer, k_GSD, v_GSD)
            work.handoff_bytes += prompt.stream.put(layer, self._start, *sides_T)
        first = self._first_needed(layer)
        if first > self._start:
            with phase("projection"):
                work.finite = finite(k_GSD[:, self._start :]) & finite(v_GSD[:, self._start :])
            prompt.states.pop(layer, None)
        if first == self._end:
            return None
        q_BHTD, total = q_THD[first - self._start :].transpose(0, 1)[None], prompt.request.prompt_tokens
        x = AttentionInput.of(
            q_BHTD,
            k_GSD[None],
            v_GSD[None],
            q_start=first,
            prompt_tokens=total,
            sink_H=self._sinks(layer),
        )
        out_BHTD, counts = self._attended(layer, x)
        work.tile_counts.append((layer, counts))
        return out_BHTD[0].transpose(0, 1)

    def _attend_to_window(
        self, layer: int, q_THD: torch.Tensor, buffers: SequenceBuffers
    ) -> torch.Tensor | None:
        """Compute attention in a layer with a rolling buffer. Its KV is not sent: the decode worker gets its
        states."""
        first, (k_GSD, v_GSD) = self._first_needed(layer), buffers.seen()
        with self.work.timer.phase("handoff"):
            buffers.keep(layer)
        if first > self._start:
            with self.work.timer.phase("projection"):
                self.work.finite = finite(k_GSD[:, buffers.before :]) & finite(v_GSD[:, buffers.before :])
        if first == self._end:
            return None
        q_BHTD = q_THD[first - self._start :].transpose(0, 1)[None]
        begin = buffers.before + first - self._start
        x = AttentionInput.of(q_BHTD, k_GSD[None], v_GSD[None], q_start=begin, sink_H=self._sinks(layer))
        out_BHTD, counts = self._attended(layer, x)
        blocks = first // BLOCK, -(-self._end // BLOCK) - first // BLOCK
        seen, causal = (tiles_of_blocks(*blocks, window) for window in (buffers.window, 0))
        heads = q_BHTD.shape[1]
        computed = torch.full_like(counts.computed, heads * seen)
        self.work.tile_counts.append((layer, TileCounts(computed, heads * causal, counts.scored_share)))
        return out_BHTD[0].transpose(0, 1)

    def _attended(self, layer: int, x: AttentionInput) -> tuple[torch.Tensor, TileCounts]:
        prompt, timer = self.prompt, self.work.timer
        timer.layer = layer
        if layer not in prompt.states:
            prompt.states[layer] = prompt.method.new_state(replace(prompt.spec, layer=layer))
        attended = prompt.method.attend(x, prompt.states[layer], timer.phase)
        timer.layer = None
        return attended

    def _first_needed(self, layer: int) -> int:
        """Return the first position whose attention is needed; the chunk's end if none is.

        In the model's last layer, attention is needed only for the logits of the prompt's last token. A
        method with a `resume_step` starts at the last multiple of it, any other at the chunk's beginning.
        """
        command = self.work.command
        if layer != self._last_layer or not (step := resume_step(self.prompt.request.method)):
            return self._start
        needed = self._end - 1 if command.last and command.wants_logits else self._end
        return max(self._start, needed // step * step)

    def _context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seen_S is not None:
            return self._cache.gather_rows(layer, self._seen_S)
        if self.prompt.first_page is None:
            return self._cache.gather(layer, self.prompt.pages_N, self._end)
        return self._cache.view_run(layer, self.prompt.first_page, self._end)

    def _chunk(self, layer: int, k_GSD: torch.Tensor, v_GSD: torch.Tensor) -> Sides:
        if self._seen_S is None:
            return k_GSD[:, self._start :].transpose(0, 1), v_GSD[:, self._start :].transpose(0, 1)
        if self.prompt.first_page is None:
            return self._cache.sides_of(layer, self.rows_T)
        return self._cache.sides_of_run(layer, self.prompt.first_page, self._start, len(self.rows_T))


def finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are finite, as a tensor on the device, so that the host need not wait."""
    return torch.isfinite(x).all()


def _to_host(x: torch.Tensor | None) -> torch.Tensor | None:
    """Copy to the host. On a GPU this only launches the copy into pinned memory."""
    return None if x is None else x.to("cpu", non_blocking=True)
