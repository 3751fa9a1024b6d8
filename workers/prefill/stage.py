"""One stage of a prefill group: a range of layers, their K/V pages, and the chunks that pass through.

Shape suffixes: T tokens of the chunk, C hidden size, H query heads, G key/value heads, D head dimension,
S tokens of the prompt so far; B (always 1 here) as the kernels have it.

A stage runs the commands of its group's controller one after the other. Stages must stay in step: for
every chunk command a stage receives once and sends once, whatever happens in between. So trouble with one
request (a method's bad options, a lost decode worker) travels on as zeros and is reported at the end of the
chunk as `RequestFailed`; any other exception is the end of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...kernels.build import build
from ...kernels.interface import Attention, AttentionInput, KernelInputError, StateSpec
from ...kernels.layers.rope import KVRows
from ...kernels.methods import MethodError
from ..kv.cache import PagedKVCache
from ..kv.handoff import HandoffError, Sender
from ..kv.page_pool import first_of_run, pages_for
from ..messages.methods import load_methods
from ..messages.stages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed
from ..model.decoder import LayerStack, Stream, load_model
from ..model.levels import amounts_for
from ..model.profile import Profile, load_profile
from ..settings import ModelSpec, PrefillConfig
from .activations import Activations, NoActivations
from .chunk import ChunkWork
from .phases import phase_timer
from .warm_up import warm_up

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


class PrefillStage:
    """Plays `roles.Stage`. One thread, commands in order; only `abandon` may be called from any thread."""

    def __init__(
        self,
        stack: LayerStack,
        cache: PagedKVCache,
        sender: Sender,
        activations: Activations,
        stage: int,
        stages: int,
        profile: Profile | None = None,
    ) -> None:
        self.stack = stack
        self._profile = profile
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

    def leave(self) -> None:
        """The group is lost: forget its requests and let go of the links. What was loaded stays. Raises what
        the device raises, if that is what broke."""
        if self.stack.device.type == "cuda":
            torch.cuda.synchronize(self.stack.device)
        for request_id in list(self._open):
            self.close(request_id)
        self._abandoned.clear()
        links, self._activations = self._activations, NoActivations()
        links.abort()

    # --- the role ----------------------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> None:
        """Prepare for a request's chunks. Raises RequestFailed if its method cannot run here."""
        stack, config = self.stack, self.stack.config
        heads = config.q_heads, config.kv_heads, config.head_dim
        spec = StateSpec(1, *heads, request.prompt_tokens, stack.device, stack.dtype)
        try:
            method = build(request.method, amounts_for(self._profile, request.method))
            states = {layer: method.new_state(replace(spec, layer=layer)) for layer in stack.layers}
        except (*_REQUEST_ERRORS, ImportError, NotImplementedError) as error:
            raise RequestFailed(f"attention method {request.method.name} cannot start: {error}") from error
        pages_N = torch.tensor(request.pages, dtype=torch.int64, device=stack.device)
        prompt = _Prompt(request, method, states, pages_N, first_of_run(request.pages))
        self._open[request.request_id] = prompt

    @torch.inference_mode()
    def run_chunk(self, command: ChunkCommand) -> ChunkReport:
        """Take one chunk through this stage's layers. Raises RequestFailed after having kept in step."""
        work = ChunkWork(command, phase_timer(self.stack.device))
        received_TC = self._receive(work)
        try:
            hidden_TC = self._compute(work, received_TC)
        except _REQUEST_ERRORS as error:
            self._drop(command.request_id)
            shape = command.tokens, self.stack.config.hidden
            self._pass_on(work, torch.zeros(shape, dtype=self.stack.dtype, device=self.stack.device))
            raise RequestFailed(str(error)) from error
        self._pass_on(work, hidden_TC)
        try:
            self._finish(work, hidden_TC)
            report = work.report(self._stage)
            self._require_finite(work)
        except _REQUEST_ERRORS as error:
            raise RequestFailed(str(error)) from error
        return report

    def close(self, request_id: str) -> None:
        """Forget a request; nothing of it may run here afterwards. Unknown ids are fine."""
        self._drop(request_id)
        self._sender.forget(request_id)

    def pages_used(self) -> int:
        return sum(prompt.pages_N.numel() for prompt in self._open.values())

    def abandon(self, serial: int) -> None:
        """Serials are never used again, so one that comes late, after `close`, does no harm."""
        self._abandoned.add(serial)

    # --- a chunk -----------------------------------------------------------------------------------------

    def _receive(self, work: ChunkWork) -> torch.Tensor | None:
        """hidden_TC from the stage before; None on the first."""
        if self._stage == 0:
            return None
        with work.timer.phase("activation_wait"):
            return self._activations.receive(work.command.tokens)

    def _pass_on(self, work: ChunkWork, hidden_TC: torch.Tensor) -> None:
        if not self._last:
            with work.timer.phase("activation_send"):
                self._activations.send(hidden_TC)

    def _compute(self, work: ChunkWork, received_TC: torch.Tensor | None) -> torch.Tensor:
        """hidden_TC after this stage's layers."""
        command, phase, stack = work.command, work.timer.phase, self.stack
        prompt = self._open.get(command.request_id)
        if prompt is None:
            raise RequestFailed(f"request {command.request_id} is not open on stage {self._stage}")
        with phase("projection"):
            hidden_TC = self._embed(command) if received_TC is None else received_TC
            stream, end = Stream(hidden_TC), command.start + command.tokens
            angles = stack.angles(torch.arange(command.start, end, device=stack.device))
            rows_T = self._rows(prompt, command.start, command.tokens)
        for layer in stack.layers:
            if prompt.request.serial in self._abandoned:
                raise RequestFailed(f"request {command.request_id} was abandoned")
            with phase("projection"):
                qkv_TXD = stack.project(layer, stream)
                q_THD = stack.rotate(layer, qkv_TXD, angles, KVRows(*self._cache.rows(layer), rows_T))
            with phase("kv_gather"):
                k_GSD, v_GSD = self._seen(prompt, layer, end)
            with phase("handoff"):  # before attention, so that K/V travels meanwhile
                work.handoff_bytes += self._announce(prompt.request, layer, command.start, k_GSD, v_GSD)
            out_THD = self._attend(prompt, layer, work, q_THD, k_GSD, v_GSD)
            with phase("projection"):
                stack.add_attention(layer, stream, out_THD)
                stack.feed_forward(layer, stream)
        with phase("projection"):
            return stream.total()

    def _embed(self, command: ChunkCommand) -> torch.Tensor:
        ids_T = np.frombuffer(command.token_ids, dtype="<u4").astype(np.int64)
        vocab = self.stack.config.vocab
        if ids_T.size != command.tokens or ids_T.max(initial=0) >= vocab:
            raise RequestFailed(
                f"{ids_T.size} token ids up to {ids_T.max(initial=0)} came for {command.tokens} tokens of a "
                f"vocabulary of {vocab}"
            )
        return self.stack.embed(torch.from_numpy(ids_T))

    def _rows(self, prompt: _Prompt, start: int, tokens: int) -> torch.Tensor:
        """Where a chunk's K/V go in each layer's pages."""
        if prompt.first_page is None:
            return self._cache.rows_of(prompt.pages_N, start, tokens)
        return self._cache.rows_of_run(prompt.first_page, start, tokens)

    def _seen(self, prompt: _Prompt, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt's k_GSD, v_GSD so far, in place where its pages are one run."""
        if prompt.first_page is None:
            return self._cache.gather(layer, prompt.pages_N, end)
        return self._cache.view_run(layer, prompt.first_page, end)

    def _announce(
        self, request: OpenRequest, layer: int, start: int, k_GSD: torch.Tensor, v_GSD: torch.Tensor
    ) -> int:
        """Hand over what is in the prompt's pages from `start` on; its bytes."""
        k_TGD, v_TGD = k_GSD[:, start:].transpose(0, 1), v_GSD[:, start:].transpose(0, 1)
        return self._sender.announce(request.request_id, request.decode_worker, layer, start, k_TGD, v_TGD)

    def _attend(
        self,
        prompt: _Prompt,
        layer: int,
        work: ChunkWork,
        q_THD: torch.Tensor,
        k_GSD: torch.Tensor,
        v_GSD: torch.Tensor,
    ) -> torch.Tensor:
        """out_THD"""
        x = AttentionInput.of(
            q_THD.transpose(0, 1)[None],
            k_GSD[None],
            v_GSD[None],
            q_start=work.command.start,
            prompt_tokens=prompt.request.prompt_tokens,
        )
        out_BHTD, coverage = prompt.method.attend(x, prompt.states[layer], work.timer.phase)
        work.coverage.append((layer, coverage))
        return out_BHTD[0].transpose(0, 1)

    def _finish(self, work: ChunkWork, hidden_TC: torch.Tensor) -> None:
        """The first logits, and what is left to hand over.

        A number that overflowed in any layer stays in the residual stream, also where sparse attention and
        page selection would never look at its token again: so it is looked for here. The device's answer is
        read with the chunk's times, or before logits leave for a first token.
        """
        command, phase = work.command, work.timer.phase
        request_id = command.request_id
        with phase("projection"):
            work.finite = torch.isfinite(hidden_TC).all()
        if self._last and command.last and command.wants_logits:
            with phase("projection"):
                logits_V = self.stack.logits(hidden_TC[-1:])[0]
            self._require_finite(work)
            with phase("handoff"):
                worker = self._open[request_id].request.decode_worker
                self._sender.first_logits(request_id, worker, logits_V)
        with phase("handoff"):
            self._sender.finish_chunk(request_id, last=command.last)

    def _require_finite(self, work: ChunkWork) -> None:
        """Waits for the device. Raises RequestFailed."""
        if not bool(work.finite):
            raise RequestFailed(f"activations are not finite numbers in {self.stack.dtype}")

    def _drop(self, request_id: str) -> None:
        prompt = self._open.pop(request_id, None)
        if prompt is not None:
            self._abandoned.discard(prompt.request.serial)


def load_stage(
    model: ModelSpec, config: PrefillConfig, stage: int, activations: Activations | None, sender: Sender
) -> PrefillStage:
    """A stage with its share of the model, warmed up. activations: None in a group of one stage."""
    for module in config.method_modules:
        load_methods(module)
    profile = load_profile(model)
    stack = load_model(model, config.device, stage, config.stages)
    shape, pages = stack.config, pages_for(config.cache_tokens)
    methods, longest = (
        [config.method(name) for name in config.warm_up],
        min(config.cache_tokens, shape.positions),
    )
    warm_up(stack, methods, config.chunk_tokens, profile, longest)
    cache = PagedKVCache(stack.layers, shape.kv_heads, shape.head_dim, pages, stack.dtype, stack.device)
    return PrefillStage(stack, cache, sender, activations or NoActivations(), stage, config.stages, profile)
