"""One stage of a prefill group: a range of layers, their K/V pages, and the chunks that pass through.

Shape suffixes: T tokens of the chunk, C hidden size, H query heads, G key/value heads, D head dimension,
S tokens of the prompt so far; B (always 1 here) as the kernels have it.

A stage runs the commands of its group's controller one after the other. Stages must stay in step: for
every chunk command a stage receives once and sends once, whatever happens in between. So trouble with one
request (a method's bad options, a lost decode worker) travels on as zeros and is reported at the end of the
chunk as `RequestFailed`; any other exception is the end of the group.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...kernels.build import build
from ...kernels.interface import Attention, AttentionInput, Coverage, KernelInputError, StateSpec
from ...kernels.methods import MethodError
from ..kv.cache import PagedKVCache
from ..kv.handoff import HandoffError, Sender
from ..kv.page_pool import first_of_run, pages_for
from ..messages import (
    ChunkCommand,
    ChunkReport,
    LayerDensity,
    OpenRequest,
    RequestFailed,
)
from ..messages import resolve as method_spec
from ..model.config import read_config
from ..model.decoder import LayerStack, load_stack, torch_dtype
from ..model.store import resolve, resolve_adapter
from ..settings import ModelSpec, PrefillConfig
from ..warm_up import warm_up_prefill
from .activations import Activations, NoActivations
from .phases import PhaseTimer, phase_timer

_REQUEST_ERRORS = (RequestFailed, HandoffError, KernelInputError, MethodError, torch.OutOfMemoryError)


@dataclass
class _Prompt:
    """An open request: its pages here, the first of them if they are one run, and what its method remembers
    of each layer."""

    request: OpenRequest
    method: Attention
    states: dict[int, Any]
    pages_N: torch.Tensor
    first_page: int | None


@dataclass
class _Tally:
    """What one chunk adds up while it runs; coverage is read from the device at the end."""

    coverage: list[tuple[int, Coverage]] = field(default_factory=list)
    handoff_bytes: int = 0

    def density(self) -> tuple[LayerDensity, ...]:
        if not self.coverage:
            return ()
        computed = torch.stack([c.computed.to(torch.float64) for _, c in self.coverage]).tolist()
        pairs = zip(self.coverage, computed, strict=True)
        return tuple(LayerDensity(layer, tiles, float(c.causal)) for (layer, c), tiles in pairs)

    def sampled_share(self) -> float:
        return sum(c.sampled for _, c in self.coverage) / max(1, len(self.coverage))


class PrefillStage:
    """One thread, commands in order; only `abandon` may be called from any thread."""

    def __init__(
        self,
        stack: LayerStack,
        cache: PagedKVCache,
        sender: Sender,
        activations: Activations,
        stage: int,
        stages: int,
    ) -> None:
        self.stack = stack
        self._cache = cache
        self._sender = sender
        self._activations = activations
        self._stage = stage
        self._last = stage == stages - 1
        self._open: dict[str, _Prompt] = {}
        self._abandoned: set[int] = set()

    def connect(self, activations: Activations) -> None:
        """Take these ends of the links to the neighbours; before the first chunk."""
        self._activations = activations

    def open(self, request: OpenRequest) -> None:
        """Prepare for a request's chunks. Raises RequestFailed if its method cannot run here."""
        config = self.stack.config
        spec = StateSpec(
            1,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            request.prompt_tokens,
            self.stack.device,
            self.stack.dtype,
        )
        try:
            method = build(request.method)
            states = {layer: method.new_state(spec) for layer in self.stack.layers}
        except (*_REQUEST_ERRORS, ImportError, NotImplementedError) as error:
            raise RequestFailed(f"attention method {request.method.name} cannot start: {error}") from error
        pages_N = torch.tensor(request.pages, dtype=torch.int64, device=self.stack.device)
        self._open[request.request_id] = _Prompt(
            request, method, states, pages_N, first_of_run(request.pages)
        )

    def run_chunk(self, command: ChunkCommand) -> ChunkReport:
        """Take one chunk through this stage's layers. Raises RequestFailed after having kept in step."""
        began = time.perf_counter()
        timer = phase_timer(self.stack.device)
        tally = _Tally()
        failure: Exception | None = None
        received_TC = None
        if self._stage > 0:
            with timer.phase("activation_wait"):
                received_TC = self._activations.receive(command.tokens)
        try:
            hidden_TC = self._compute(command, received_TC, timer, tally)
        except _REQUEST_ERRORS as error:
            failure = error
            self._drop(command.request_id)
            width = self.stack.config.hidden
            hidden_TC = torch.zeros(command.tokens, width, dtype=self.stack.dtype, device=self.stack.device)
        if not self._last:
            with timer.phase("activation_send"):
                self._activations.send(hidden_TC)
        if failure is None:
            failure = self._finish(command, hidden_TC, timer)
        if failure is not None:
            raise RequestFailed(str(failure)) from failure
        phases, density = timer.seconds(), tally.density()
        return ChunkReport(
            request_id=command.request_id,
            stage=self._stage,
            start=command.start,
            wall=time.perf_counter() - began,
            phases=phases,
            density=density,
            sampled_share=tally.sampled_share(),
            handoff_bytes=tally.handoff_bytes,
        )

    def close(self, request_id: str) -> None:
        """Forget a request; nothing of it may run here afterwards. Unknown ids are fine."""
        self._drop(request_id)
        self._sender.forget(request_id)

    def abandon(self, serial: int) -> None:
        """Let the request's chunks fail from the next layer on: nobody wants them any more. Serials are
        never used again, so one that comes late, after `close`, does no harm."""
        self._abandoned.add(serial)

    def _drop(self, request_id: str) -> None:
        prompt = self._open.pop(request_id, None)
        if prompt is not None:
            self._abandoned.discard(prompt.request.serial)

    def pages_used(self) -> int:
        """Pages of the requests that are open here."""
        return sum(prompt.pages_N.numel() for prompt in self._open.values())

    def _compute(
        self, command: ChunkCommand, hidden_TC: torch.Tensor | None, timer: PhaseTimer, tally: _Tally
    ) -> torch.Tensor:
        prompt = self._open.get(command.request_id)
        if prompt is None:
            raise RequestFailed(f"request {command.request_id} is not open on stage {self._stage}")
        if hidden_TC is None:
            with timer.phase("projection"):
                hidden_TC = self._embed(command)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attend(prompt, command.start, layer, (q, k, v), timer, tally)

        positions_T = torch.arange(command.start, command.start + command.tokens, device=self.stack.device)
        return self.stack.forward(hidden_TC, positions_T, attend, timer.phase)

    def _attend(
        self,
        prompt: _Prompt,
        start: int,
        layer: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        timer: PhaseTimer,
        tally: _Tally,
    ) -> torch.Tensor:
        """out_THD. K/V is announced before attention runs, so that it travels meanwhile."""
        q_THD, k_TGD, v_TGD = qkv
        request = prompt.request
        if request.serial in self._abandoned:
            raise RequestFailed(f"request {request.request_id} was abandoned")
        with timer.phase("handoff"):
            tally.handoff_bytes += self._sender.announce(
                request.request_id, request.decode_worker, layer, start, k_TGD, v_TGD
            )
        with timer.phase("kv_write"):
            k_GSD, v_GSD = self._keep(prompt, layer, start, k_TGD, v_TGD)
        x = AttentionInput.of(
            q_THD.transpose(0, 1)[None],
            k_GSD[None],
            v_GSD[None],
            q_start=start,
            prompt_tokens=request.prompt_tokens,
        )
        out_BHTD, coverage = prompt.method.attend(x, prompt.states[layer], timer.phase)
        tally.coverage.append((layer, coverage))
        return out_BHTD[0].transpose(0, 1)

    def _keep(
        self, prompt: _Prompt, layer: int, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a chunk's K/V; the prompt's k_GSD, v_GSD so far, in place where its pages are one run."""
        end = start + k_TGD.shape[0]
        if prompt.first_page is None:
            self._cache.write(layer, prompt.pages_N, start, k_TGD, v_TGD)
            return self._cache.gather(layer, prompt.pages_N, end)
        self._cache.write_run(layer, prompt.first_page, start, k_TGD, v_TGD)
        return self._cache.view_run(layer, prompt.first_page, end)

    def _embed(self, command: ChunkCommand) -> torch.Tensor:
        ids_T = np.frombuffer(command.token_ids, dtype="<u4").astype(np.int64)
        vocab = self.stack.config.vocab
        if ids_T.size != command.tokens or ids_T.max(initial=0) >= vocab:
            raise RequestFailed(
                f"{ids_T.size} token ids up to {ids_T.max(initial=0)} came for {command.tokens} tokens of a "
                f"vocabulary of {vocab}"
            )
        return self.stack.embed(torch.from_numpy(ids_T))

    def _finish(self, command: ChunkCommand, hidden_TC: torch.Tensor, timer: PhaseTimer) -> Exception | None:
        """The first logits, and what is left to post. Returns the request's trouble, if any.

        A number that overflowed in any layer stays in the residual stream, also where sparse attention and
        page selection would never look at its token again: so it is looked for here.
        """
        try:
            with timer.phase("projection"):
                finite = bool(torch.isfinite(hidden_TC).all())
            if not finite:
                return RequestFailed(f"activations are not finite numbers in {self.stack.dtype}")
            if self._last and command.last and command.wants_logits:
                with timer.phase("projection"):
                    logits_V = self.stack.logits(hidden_TC[-1:])[0]
                with timer.phase("handoff"):
                    worker = self._open[command.request_id].request.decode_worker
                    self._sender.first_logits(command.request_id, worker, logits_V)
            with timer.phase("handoff"):
                self._sender.finish_chunk(command.request_id, last=command.last)
        except _REQUEST_ERRORS as error:
            return error
        return None


def load_stage(
    model: ModelSpec, config: PrefillConfig, stage: int, activations: Activations | None, sender: Sender
) -> PrefillStage:
    """Load a stage's share of the model and its pages, and warm up as configured. activations: None in a
    group of one stage."""
    directory = resolve(model.path)
    shape = read_config(directory, model.overrides)
    device, dtype = torch.device(config.device), torch_dtype(model)
    layers = shape.split(config.stages)[stage]
    stack = load_stack(
        directory,
        shape,
        layers,
        embedding=stage == 0,
        head=stage == config.stages - 1,
        dtype=dtype,
        device=device,
        adapter=None if model.adapter is None else resolve_adapter(model.adapter),
    )
    warm_up_prefill(stack, [method_spec(name) for name in config.warm_up], config.chunk_tokens)
    pages = pages_for(config.cache_tokens)
    cache = PagedKVCache(layers, shape.kv_heads, shape.head_dim, pages, dtype, device)
    return PrefillStage(stack, cache, sender, activations or NoActivations(), stage, config.stages)
