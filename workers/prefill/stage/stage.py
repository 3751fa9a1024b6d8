"""A pipeline stage of a prefill group.

Stages must stay in step: for every batch of chunks, a stage receives hidden states once and sends once. If a
request fails, the stage sends zeros for its chunk and returns `RequestFailed` in place of a report. Any other
exception ends the group.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import KernelInputError, StateSpec
from deltafront.kernels.methods import MethodError
from deltafront.kernels.methods import load as load_methods
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.fetch import KVSource, NoKVSource, from_host, pieces
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError, KVSender, KVStream
from deltafront.workers.kv.pages.pool import first_of_run, pages_for
from deltafront.workers.kv.rolling_buffers import make_states
from deltafront.workers.kv.states import StateCache
from deltafront.workers.messages.stages import (
    ChunkCommand,
    ChunkReport,
    HandoffFailed,
    OpenRequest,
    RequestFailed,
)
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile, load_profile
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.prefill.stage.activations import Activations, NoActivations
from deltafront.workers.prefill.stage.batch import BatchAttention
from deltafront.workers.prefill.stage.chunk import (
    BatchTimes,
    ChunkAttention,
    ChunkWork,
    OpenPrompt,
    finite,
)
from deltafront.workers.prefill.stage.phases import PhaseTimer, phase_timer
from deltafront.workers.prefill.stage.warm_up import warm_up, warm_up_kv
from deltafront.workers.progress import Tell, silent
from deltafront.workers.settings import KVDtype, ModelSpec, PrefillConfig
from deltafront.workers.tracing import NO_TRACER, Tracer
from deltafront.workers.waits import said_when_slow

_ASK_AGAIN_S = 0.01
_REQUEST_ERRORS = (RequestFailed, HandoffError, KernelInputError, MethodError, torch.OutOfMemoryError)


class PrefillStage:
    """A pipeline stage that runs chunks of prompts through its layers (`roles.Stage`).

    One thread calls its methods. A second thread calls the functions that `run_batch` returns, in the same
    order. Any thread may call `abandon`.
    """

    def __init__(
        self,
        stack: LayerStack,
        cache: PagedKVCache,
        sender: KVSender,
        activations: Activations,
        *,
        stage: int,
        stages: int,
        profile: Profile | None = None,
        source: KVSource | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.stack = stack
        self._source = source or NoKVSource()
        self._profile = profile
        self._cache = cache
        self._sender = sender
        self._activations = activations
        self._stage = stage
        self._last = stage == stages - 1
        self._open: dict[str, OpenPrompt] = {}
        self._abandoned: set[int] = set()
        self._streams: dict[str, KVStream] = {}
        """KV streams by request id, until the request's pages are free. Decode workers may still read the
        pages of a closed request."""
        self._tracer = tracer
        self._through = 0.0
        """The perf_counter time at which the device finished the last batch."""

    def connect(self, activations: Activations) -> None:
        self._activations = activations

    def leave(self) -> None:
        """Leave a lost group, but keep the model. Wait until no decode worker reads this stage's pages.

        If a device error is the reason why the group was lost, raises that error.
        """
        links, self._activations = self._activations, NoActivations()
        links.abort()  # first, since kernels on the device may wait for a neighbour
        if self.stack.device.type == "cuda":
            torch.cuda.synchronize(self.stack.device)
        del links  # unmaps the neighbours' memory, which the device may have read until now
        with said_when_slow(lambda: f"decode workers that read pages of {', '.join(tuple(self._streams))}"):
            while self._streams:
                for request_id in list(self._streams):
                    self.close(request_id)
                if self._streams:
                    time.sleep(_ASK_AGAIN_S)
        self._abandoned.clear()

    # --- methods of roles.Stage ---------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> None:
        stack, config = self.stack, self.stack.config
        heads = config.q_heads, config.kv_heads, config.head_dim
        spec = StateSpec(1, *heads, request.prompt_tokens, stack.device, stack.dtype)
        try:
            thresholds = thresholds_for(self._profile, request.method)
            method = build(request.method, thresholds, config.windows)
            attend = config.attention_layers(stack.layers)
            states = {layer: method.new_state(replace(spec, layer=layer)) for layer in attend}
        except (*_REQUEST_ERRORS, ImportError, NotImplementedError) as error:
            raise RequestFailed(f"attention method {request.method.name} cannot start: {error}") from error
        destination = Destination(
            request_id=request.request_id,
            decode_worker=request.decode_worker,
            attempt=request.attempt,
            pages=request.pages,
            state_places=request.state_places,
        )
        try:
            stream = self._sender.open(destination)
        except HandoffError as error:
            raise HandoffFailed(str(error)) from error
        self._streams[request.request_id] = stream
        self._open[request.request_id] = OpenPrompt(
            request=request,
            method=method,
            stream=stream,
            spec=spec,
            states=states,
            pages_N=self._to_device(np.array(stream.pages, dtype=np.int64)),
            first_page=first_of_run(stream.pages),
        )
        try:
            self._open[request.request_id].live = self._first_state(request)
            if request.start and not stream.has_prefix:
                self._fetch_kv(request, stream.pages)
        except _REQUEST_ERRORS as error:
            self._drop(request.request_id)
            raise RequestFailed(str(error)) from error

    def _first_state(self, request: OpenRequest) -> StateCache | None:
        """Return the state with which a prompt begins on this stage: zeros, or the decode worker's if it
        resumes. None: no layer of the stage has a state."""
        stack = self.stack
        first = make_states(stack.config, stack.layers, 1, stack.dtype, stack.device)
        if first is None or not request.start:
            return first
        held = self._source.state(request.decode_worker, request.request_id)
        if held.tokens != request.start:
            raise RequestFailed(f"a state after {held.tokens} tokens came for a prompt at {request.start}")
        rows = [held.layers.index(layer) for layer in first.layers]
        first.write([0], first.layers, [array[rows] for array in held.arrays])
        return first

    def _fetch_kv(self, request: OpenRequest, pages: Sequence[int]) -> None:
        if self.stack.device.type == "cuda":  # another request's abandoned chunk may still write to the pages
            torch.cuda.synchronize(self.stack.device)
        began = time.perf_counter()
        wanted = pieces(request.request_id, self._cache, request.start)
        for piece, kv in self._source.fetch(request.decode_worker, wanted):
            if request.serial in self._abandoned:
                raise RequestFailed(f"request {request.request_id} was abandoned")
            layer = {piece.layer: from_host(kv, piece, self._cache)}
            self._cache.write_layers(pages, piece.start, layer)
        self._open[request.request_id].fetch_s = time.perf_counter() - began

    @torch.inference_mode()
    def run_batch(self, commands: Sequence[ChunkCommand]) -> Callable[[], list[ChunkReport | RequestFailed]]:
        timer, tokens = phase_timer(self.stack.device), sum(command.tokens for command in commands)
        works = [ChunkWork(command=command, timer=timer) for command in commands]
        received_TC = self._receive(timer, tokens)
        begun = [self._begin(work) for work in works]
        chunks, own = [chunk for chunk in begun if chunk is not None], _rows_of(commands, begun)
        if received_TC is not None and own is not None:
            received_TC = received_TC[own]
        parts: Sequence[torch.Tensor] = ()
        try:
            if chunks:
                parts = self._compute(chunks, timer, received_TC)
        except _REQUEST_ERRORS as error:
            self._fail_all(chunks, error)
        self._pass_on(timer, parts, own, tokens)
        try:
            if parts:
                self._finish(chunks, timer, parts)
        except _REQUEST_ERRORS as error:
            self._fail_all(chunks, error)
        for work in works:
            work.seal()
        return partial(self._reports, works)

    def close(self, request_id: str) -> bool:
        self._drop(request_id)
        stream = self._streams.get(request_id)
        if stream is not None and not stream.close():
            return False
        self._streams.pop(request_id, None)
        return True

    def pages_used(self) -> int:
        return sum(prompt.pages_N.numel() for prompt in self._open.values())

    def abandon(self, serial: int) -> None:
        """Stop a request's chunks. Serials are never reused, so a call after `close` is harmless."""
        self._abandoned.add(serial)

    # --- a batch of chunks --------------------------------------------------------------------------------

    def _receive(self, timer: PhaseTimer, tokens: int) -> torch.Tensor | None:
        if self._stage == 0:
            return None
        with timer.phase("activation_wait"):
            return self._activations.receive(tokens)

    def _begin(self, work: ChunkWork) -> ChunkAttention | None:
        """Prepare a chunk. None: it has failed."""
        prompt = self._open.get(work.command.request_id)
        try:
            if prompt is None:
                raise RequestFailed(f"request {work.command.request_id} is not open on stage {self._stage}")
            if self._stage == 0:
                self._check_ids(work.command)
            work.fetch_s, prompt.fetch_s = prompt.fetch_s, 0.0
            work.stream = prompt.stream
            serial, stack = prompt.request.serial, self.stack
            return ChunkAttention(
                prompt,
                work,
                self._cache,
                stack.config.layers - 1,
                lambda: serial in self._abandoned,
                stack.sinks,
            )
        except _REQUEST_ERRORS as error:
            self._fail(work, error)
            return None

    def _fail(self, work: ChunkWork, error: Exception) -> None:
        work.failure = self._failure(work, error)
        self._drop(work.command.request_id)

    def _fail_all(self, chunks: Sequence[ChunkAttention], error: Exception) -> None:
        for chunk in chunks:
            if chunk.work.failure is None:
                self._fail(chunk.work, error)

    def _compute(
        self, chunks: Sequence[ChunkAttention], timer: PhaseTimer, received_TC: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        """Run the chunks through the stage's layers. Returns each chunk's hidden_TC of the rows that later
        layers or logits need."""
        stack, commands = self.stack, [chunk.work.command for chunk in chunks]
        with timer.phase("projection"):
            hidden_TC = self._embed(commands) if received_TC is None else received_TC
            starts = [(command.start, command.start + command.tokens) for command in commands]
            positions = [torch.arange(*each, device=stack.device) for each in starts]
            positions_T = positions[0] if len(positions) == 1 else torch.cat(positions)
            attention = BatchAttention(chunks, self._cache, _REQUEST_ERRORS, self._fail)
        hidden_TC = stack.run(hidden_TC, positions_T, attention, phase=timer.phase)
        with timer.phase("handoff"):
            for chunk in chunks:
                chunk.copy_states()
        return torch.split(hidden_TC, attention.rows)

    def _check_ids(self, command: ChunkCommand) -> None:
        ids_T, vocab = np.frombuffer(command.token_ids, dtype="<u4"), self.stack.config.vocab
        if ids_T.size != command.tokens or ids_T.max(initial=0) >= vocab:
            raise RequestFailed(
                f"{ids_T.size} token ids up to {ids_T.max(initial=0)} came for {command.tokens} tokens of a "
                f"vocabulary of {vocab}"
            )

    def _embed(self, commands: Sequence[ChunkCommand]) -> torch.Tensor:
        ids_T = np.frombuffer(b"".join(command.token_ids for command in commands), dtype="<u4")
        return self.stack.embed(self._to_device(ids_T.astype(np.int64)))

    def _pass_on(
        self, timer: PhaseTimer, parts: Sequence[torch.Tensor], own: Sequence[int] | None, tokens: int
    ) -> None:
        """Send a batch's hidden states to the next stage: `parts` in the rows `own` (None: in all rows), and
        zeros in the others."""
        if self._last:
            return
        with timer.phase("activation_send"):
            hidden_TC = parts[0] if len(parts) == 1 else torch.cat(list(parts)) if parts else None
            if hidden_TC is None or own is not None:
                shape = tokens, self.stack.config.hidden
                whole_TC = torch.zeros(shape, dtype=self.stack.dtype, device=self.stack.device)
                if hidden_TC is not None:
                    whole_TC[own] = hidden_TC
                hidden_TC = whole_TC
            self._activations.send(hidden_TC)

    def _to_device(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Return the array as a tensor on the device. A GPU copies it from pinned memory; any other copy
        would wait for all launched work."""
        x = torch.from_numpy(array)
        if self.stack.device.type == "cuda":
            return x.pin_memory().to(self.stack.device, non_blocking=True)
        return x

    def _finish(
        self, chunks: Sequence[ChunkAttention], timer: PhaseTimer, parts: Sequence[torch.Tensor]
    ) -> None:
        """Launch each chunk's check for overflow and the rest of its KV hand-off. The last stage also
        launches the logits of last tokens, where commands want them.

        The check needs only the last layer's output, because an overflow in any layer stays in the residual.
        """
        live = [(each, part_TC) for each, part_TC in zip(chunks, parts, strict=True) if not each.work.failure]
        with timer.phase("projection"):
            for chunk, part_TC in live:
                work, stays_finite = chunk.work, finite(part_TC)
                work.finite = stays_finite if work.finite is None else stays_finite & work.finite
            asked = [
                (chunk.work, part_TC[-1:])
                for chunk, part_TC in live
                if self._last and chunk.work.command.last and chunk.work.command.wants_logits
            ]
            if asked:
                logits_RV = self.stack.logits(torch.cat([last_1C for _, last_1C in asked]))
                for (work, _), logits_V in zip(asked, logits_RV, strict=True):
                    work.logits_V = logits_V
        with timer.phase("handoff"):
            for chunk, _ in live:
                try:
                    chunk.work.sent = chunk.prompt.stream.end_chunk()
                except _REQUEST_ERRORS as error:
                    self._fail(chunk.work, error)

    def _reports(self, works: Sequence[ChunkWork]) -> list[ChunkReport | RequestFailed]:
        for work in works:
            work.wait()
        after, self._through = self._through, works[-1].through
        times = BatchTimes.of(works, after)
        return [self._report(work, times) for work in works]

    def _report(self, work: ChunkWork, times: BatchTimes) -> ChunkReport | RequestFailed:
        if work.failure is not None:
            return work.failure
        stream, sent = work.stream, work.sent
        assert stream is not None and sent is not None, "a chunk that has not failed has ended its KV"
        try:
            if not bool(work.finite):
                raise RequestFailed(f"activations are not finite numbers in {self.stack.dtype}")
            for tokens, state in work.states:
                layers = tuple(n for n in self.stack.config.state_layers if n in self.stack.layers)
                stream.put_state(tokens, layers, state)
            if work.logits_V is not None:
                stream.put_logits(work.logits_V)
            sent()
        except _REQUEST_ERRORS as error:
            return self._failure(work, error)
        report = work.report(self._stage, times)
        if work.command.trace:
            seconds = {f"seconds.{phase}": seconds for phase, seconds in report.phases.items()}
            ahead = {} if report.launched_ahead is None else {"lead": report.launched_ahead}
            self._trace(work, report.wall, {"finish": "finished", **ahead, **seconds})
        return report

    def _failure(self, work: ChunkWork, error: Exception) -> RequestFailed:
        prompt, seconds = self._open.get(work.command.request_id), time.perf_counter() - work.began
        if prompt is not None and prompt.request.serial in self._abandoned:
            self._trace(work, seconds, {"finish": "cancelled"})
        else:
            self._trace(work, seconds, {"finish": "failed"}, str(error))
        kind = HandoffFailed if isinstance(error, HandoffError) else RequestFailed
        return kind(str(error))

    def _trace(self, work: ChunkWork, seconds: float, about: dict[str, Any], error: str = "") -> None:
        about = {"stage": self._stage, "handoff_bytes": work.handoff_bytes, **about}
        self._tracer.done("stage", work.command.trace, seconds, error, **about)

    def _drop(self, request_id: str) -> None:
        prompt = self._open.pop(request_id, None)
        if prompt is not None:
            self._abandoned.discard(prompt.request.serial)


def _rows_of(commands: Sequence[ChunkCommand], begun: Sequence[ChunkAttention | None]) -> list[int] | None:
    """Return the rows of the chunks that have begun, among their batch's hidden states; None: all rows."""
    if None not in begun:
        return None
    ends = itertools.accumulate(command.tokens for command in commands)
    each = zip(commands, ends, begun, strict=True)
    return [row for command, end, one in each if one is not None for row in range(end - command.tokens, end)]


def load_stage(
    model: ModelSpec,
    config: PrefillConfig,
    stage: int,
    activations: Activations | None,
    sender: Callable[[PagedKVCache], KVSender],
    *,
    memory: tuple[LayerStack, PagedKVCache] | None = None,
    kv_dtype: KVDtype | None = None,
    source: KVSource | None = None,
    tell: Tell = silent,
    tracer: Tracer = NO_TRACER,
) -> PrefillStage:
    """Load a stage and warm it up.

    Args:
        activations: The links to the neighbours; None in a group of one stage.
        sender: Makes the `KVSender` for the stage's cache.
        memory: A decode worker's weights and KV cache that this stage has mapped; None: it has its own.
        kv_dtype: As in `DecodeConfig`.
        source: Fetches KV from decode workers to resume prompts; None: prompts cannot be resumed.
    """
    for module in config.method_modules:
        load_methods(module)
    profile = load_profile(model)
    stack = memory[0] if memory else load_model(model, config.device, stage, config.stages, tell=tell)
    shape, pages = stack.config, pages_for(config.cache_tokens)
    methods = [config.method(name, options) for name, options in config.warmed_up]
    longest = min(config.cache_tokens, shape.positions)
    warm_up(stack, methods, config.chunk_tokens, profile, longest, tell)
    if kv_dtype == "int8":
        warm_up_kv(stack)
    heads, attend = (shape.kv_heads, shape.head_dim), shape.page_layers(stack.layers)
    cache = (
        memory[1]
        if memory
        else PagedKVCache(attend, *heads, pages, stack.dtype, stack.device, int8=kv_dtype == "int8")
    )
    ends, place = activations or NoActivations(), {"stage": stage, "stages": config.stages}
    return PrefillStage(
        stack, cache, sender(cache), ends, **place, profile=profile, source=source, tracer=tracer
    )
