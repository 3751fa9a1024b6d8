"""A pipeline stage of a prefill group.

Stages must stay in step: for every chunk, a stage receives hidden states once and sends once. If a request
fails, the stage sends zeros and raises `RequestFailed` for the chunk. Any other exception ends the group.
"""

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
from deltafront.workers.prefill.stage.chunk import ChunkAttention, ChunkWork, OpenPrompt, finite
from deltafront.workers.prefill.stage.phases import phase_timer
from deltafront.workers.prefill.stage.warm_up import warm_up, warm_up_kv
from deltafront.workers.progress import Tell, silent
from deltafront.workers.settings import KVDtype, ModelSpec, PrefillConfig
from deltafront.workers.tracing import NO_TRACER, Tracer
from deltafront.workers.waits import said_when_slow

_ASK_AGAIN_S = 0.01
_REQUEST_ERRORS = (RequestFailed, HandoffError, KernelInputError, MethodError, torch.OutOfMemoryError)


class PrefillStage:
    """A pipeline stage that runs chunks of prompts through its layers (`roles.Stage`).

    One thread calls its methods. A second thread calls the functions that `run_chunk` returns, in the same
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
        """The perf_counter time at which the device finished the last chunk."""

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
    def run_chunk(self, command: ChunkCommand) -> Callable[[], ChunkReport]:
        work = ChunkWork(command=command, timer=phase_timer(self.stack.device))
        if prompt := self._open.get(command.request_id):
            work.fetch_s, prompt.fetch_s = prompt.fetch_s, 0.0
        received_TC = self._receive(work)
        try:
            hidden_TC = self._compute(work, received_TC)
        except _REQUEST_ERRORS as error:
            failure = self._failure(work, error)
            self._drop(command.request_id)
            shape = command.tokens, self.stack.config.hidden
            self._pass_on(work, torch.zeros(shape, dtype=self.stack.dtype, device=self.stack.device))
            raise failure from error
        self._pass_on(work, hidden_TC)
        stream = self._open[command.request_id].stream
        try:
            sent = self._finish(work, hidden_TC, stream)
        except _REQUEST_ERRORS as error:
            raise self._failure(work, error) from error
        return partial(self._report, work, sent, stream)

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

    # --- a chunk ------------------------------------------------------------------------------------------

    def _receive(self, work: ChunkWork) -> torch.Tensor | None:
        if self._stage == 0:
            return None
        with work.timer.phase("activation_wait"):
            return self._activations.receive(work.command.tokens)

    def _pass_on(self, work: ChunkWork, hidden_TC: torch.Tensor) -> None:
        if not self._last:
            with work.timer.phase("activation_send"):
                self._activations.send(hidden_TC)

    def _compute(self, work: ChunkWork, received_TC: torch.Tensor | None) -> torch.Tensor:
        command, phase, stack = work.command, work.timer.phase, self.stack
        prompt = self._open.get(command.request_id)
        if prompt is None:
            raise RequestFailed(f"request {command.request_id} is not open on stage {self._stage}")
        with phase("projection"):
            hidden_TC = self._embed(command) if received_TC is None else received_TC
            positions_T = torch.arange(command.start, command.start + command.tokens, device=stack.device)
        serial, last_layer = prompt.request.serial, stack.config.layers - 1
        attention = ChunkAttention(
            prompt, work, self._cache, last_layer, lambda: serial in self._abandoned, stack.sinks
        )
        hidden_TC = stack.run(hidden_TC, positions_T, attention, phase=phase)
        with phase("handoff"):
            attention.copy_states()
        return hidden_TC

    def _embed(self, command: ChunkCommand) -> torch.Tensor:
        ids_T = np.frombuffer(command.token_ids, dtype="<u4").astype(np.int64)
        vocab = self.stack.config.vocab
        if ids_T.size != command.tokens or ids_T.max(initial=0) >= vocab:
            raise RequestFailed(
                f"{ids_T.size} token ids up to {ids_T.max(initial=0)} came for {command.tokens} tokens of a "
                f"vocabulary of {vocab}"
            )
        return self.stack.embed(self._to_device(ids_T))

    def _to_device(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Return the array as a tensor on the device. A GPU copies it from pinned memory; any other copy
        would wait for all launched work."""
        x = torch.from_numpy(array)
        if self.stack.device.type == "cuda":
            return x.pin_memory().to(self.stack.device, non_blocking=True)
        return x

    def _finish(self, work: ChunkWork, hidden_TC: torch.Tensor, stream: KVStream) -> Callable[[], None]:
        """Launch a chunk's check for overflow and the rest of its KV hand-off. The last stage also launches
        the logits of the prompt's last token, if the command wants them.

        Returns a function that completes the hand-off.

        The check needs only the last layer's output, because an overflow in any layer stays in the residual.
        """
        command, phase = work.command, work.timer.phase
        with phase("projection"):
            stays_finite = finite(hidden_TC)
            work.finite = stays_finite if work.finite is None else stays_finite & work.finite
            if self._last and command.last and command.wants_logits:
                work.logits_V = self.stack.logits(hidden_TC[-1:])[0]
        with phase("handoff"):
            sent = stream.end_chunk()
        work.seal()
        return sent

    def _report(self, work: ChunkWork, sent: Callable[[], None], stream: KVStream) -> ChunkReport:
        work.wait()
        after, self._through = self._through, work.through
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
            raise self._failure(work, error) from error
        report = work.report(self._stage, after)
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
