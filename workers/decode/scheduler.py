"""Continuous batching on a decode worker: chooses the next work and delivers the tokens.

Each turn admits requests, samples their first tokens, runs one prefill step (`Read`) of one request and one
decode step of all running requests. A cancelled request leaves between these steps. Tensor work runs on the
compute thread, everything else on the event loop's thread.
"""

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from deltafront.kernels.constants import BLOCK
from deltafront.workers.decode.reads import Read, Recompute, Step
from deltafront.workers.decode.request import DecodeRequest
from deltafront.workers.decode.runner import DecodeRunner, ReadPart, ReadResult, ReadStates
from deltafront.workers.decode.step_rows import LaunchedStep, SampledToken
from deltafront.workers.messages.events import FinishReason, PromptLogprobs, Token
from deltafront.workers.model.grammars import Mask
from deltafront.workers.pace import Recent
from deltafront.workers.settings import DecodeConfig
from deltafront.workers.turns import Turns

T = TypeVar("T")
_FAILED_TURNS = 3
"""The worker is replaced after this many consecutive failures of one kind of work."""


@dataclass(frozen=True)
class _LaunchedAhead:
    requests: tuple[DecodeRequest, ...]
    step: LaunchedStep
    pages_in_use: ExitStack


class DecodeScheduler:
    """Runs at most `config.max_batch` requests at once. Service tiers share the places that become free by
    weight; within a tier, first come, first served. Requests that need prefill take turns, one step each.

    Args:
        before_first: Called once for each request, before its first token is delivered.
        gap_s: Returns the fewest seconds between the starts of two decode steps; 0: none.
    """

    def __init__(
        self,
        runner: DecodeRunner,
        thread: Executor,
        before_first: Callable[[DecodeRequest], None],
        config: DecodeConfig,
        eos_ids: Sequence[int],
        clock: Callable[[], float],
        gap_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._runner = runner
        self._thread = thread
        self._before_first = before_first
        self._clock = clock
        self._gap_s = gap_s
        self._last_step = -math.inf
        """The time at which the last decode step began."""
        self._turns_since_step, self._turn_s = 0, 0.0
        """The prefill turns since that step, and the seconds of the last turn."""
        self._config = config
        self._eos_ids = frozenset(eos_ids)
        self._waiting: deque[DecodeRequest] = deque()
        self._turns = Turns()
        self._appending: deque[DecodeRequest] = deque()
        self._running: list[DecodeRequest] = []
        self._begun: set[DecodeRequest] = set()
        """Requests whose `Read` has computed its first layers. The runner keeps their hidden states."""
        self._ahead: _LaunchedAhead | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._failures: Counter[str] = Counter()
        self.fault = ""
        self.appended = Recent()
        """The prefill rate over full chunks. Shorter ones are left out, since their time is mostly fixed."""

    @property
    def running(self) -> int:
        return len(self._running) + len(self._appending)

    @property
    def submitted(self) -> int:
        return self.running + len(self._waiting)

    def submit(self, request: DecodeRequest) -> None:
        request.times.ready = self._clock()
        self._waiting.append(request)
        self._wake.set()

    def wake(self) -> None:
        """Make the loop look for work again, because KV has arrived."""
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def drop_ended(self) -> None:
        self._waiting = deque(request for request in self._waiting if request.ended is None)
        self._appending = deque(request for request in self._appending if request.ended is None)
        self._running = [request for request in self._running if request.ended is None]

    async def run(self) -> None:
        while not self._stopping:
            self._wake.clear()  # before looking for work, so that no later `stop` or `wake` is lost
            self.drop_ended()
            await self._forget_ended()
            if not self._has_work():
                await self._wake.wait()
                continue
            firsts = self._admit()
            if firsts:
                await self._sample_first(firsts)
                self.drop_ended()
            if (request := self._next_to_read()) is not None and self._turn_fits():
                await self._read(request)
            self.drop_ended()
            if (pause := self._pause_s()) <= 0.0:
                if self._running or self._ahead:
                    await self._decode()
            elif self._next_to_read() is None or not self._turn_fits():
                await self._woken_within(pause)
        if self._ahead:
            await self._decode()

    def _pause_s(self) -> float:
        """Return the seconds to wait before the next decode step. A step that was launched ahead is not
        delayed.
        """
        gap_s = self._gap_s() if self._running and not self._ahead else 0.0
        return self._last_step + gap_s - self._clock() if gap_s else 0.0

    def _turn_fits(self) -> bool:
        """Say whether a prefill turn may run now: one between two decode steps, and more if they end before
        the next step is due."""
        return not self._running or not self._turns_since_step or self._turn_s <= self._pause_s()

    async def _woken_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _has_work(self) -> bool:
        may_admit = self._waiting and self.running < self._config.max_batch
        return bool(may_admit or self._next_to_read() or self._running or self._ahead)

    def _next_to_read(self) -> DecodeRequest | None:
        return next((request for request in self._appending if request.layers_to_read), None)

    async def _forget_ended(self) -> None:
        for request in [request for request in self._begun if request.ended is not None]:
            self._begun.remove(request)
            forget = partial(self._runner.forget_read, request.serial)
            await self._computed("giving up a read", [], forget)

    def _admit(self) -> list[DecodeRequest]:
        firsts: list[DecodeRequest] = []
        while self._waiting and self.running + len(firsts) < self._config.max_batch:
            request = self._next_waiting()
            request.times.admitted = self._clock()
            if request.reads:
                self._appending.append(request)
            else:
                request.times.read = request.times.admitted
                firsts.append(request)
        return firsts

    def _next_waiting(self) -> DecodeRequest:
        tiers = {request.options.service_tier for request in self._waiting}
        tier = self._turns.order(tiers)[0]
        request = next(one for one in self._waiting if one.options.service_tier is tier)
        self._waiting.remove(request)
        self._turns.give(tier, 1, tiers)
        return request

    async def _sample_first(self, requests: Sequence[DecodeRequest]) -> None:
        logits, rows = [request.logits for request in requests], [request.row for request in requests]
        copies = [request.pages.copy_out for request in requests if request.pages.copy_out is not None]

        def work() -> list[SampledToken]:
            chosen = self._runner.first_tokens(logits, rows, copies, _masks(requests))
            _take(requests, chosen)
            return chosen

        chosen = await self._computed("first tokens", requests, work)
        for request, choice in zip(requests, chosen or (), strict=False):
            if request.ended is None:
                request.times.first = self._clock()
                request.logits = None
                self._running.append(request)
                self._deliver(request, choice)

    async def _read(self, request: DecodeRequest) -> None:
        """Run a request's next prefill step, or the first of its layers that are left. After the last step,
        sample the first token."""
        self._appending.remove(request)
        self._appending.append(request)
        step, last = request.reads[0], len(request.reads) == 1
        layers = request.layers_to_read[: self._layers_a_turn(request, step)]
        try:
            if not layers.start:
                request.prepare(step)
        except ValueError as error:
            self._fail("appended tokens", [request], error)
            return
        began = self._clock()
        work = self._work(request, step, layers, last)
        outcome = await self._computed("appended tokens", [request], work)
        self._turns_since_step, self._turn_s = self._turns_since_step + 1, self._clock() - began
        whole = len(layers) == request.layers
        if whole and isinstance(step, Read) and len(step.ids) == self._config.append_chunk_tokens:
            self.appended.add(len(step.ids), self._clock() - began)
        if outcome is None or request.ended is not None:
            return
        if layers.stop < request.layers:
            request.layers_read = layers.stop
            return
        request.layers_read = 0
        self._begun.discard(request)
        request.reads.popleft()
        if isinstance(step, Recompute):
            request.times.recomputed_tokens += BLOCK * len(request.blocks)
        elif step.select_blocks:
            request.blocks, request.times.blocks_selected = outcome.blocks, self._clock()
        request.length = max(request.length, step.end)
        if outcome.logprobs:
            request.events.put_nowait(PromptLogprobs(tokens=outcome.logprobs))
        if last:
            self._appending.remove(request)
            request.logits = outcome.logits_V
            request.times.read = self._clock()
            await self._begin_answer(request)

    def _layers_a_turn(self, request: DecodeRequest, step: Step) -> int:
        """Return how many layers of a prefill step a turn computes: while others decode, no more work than a
        chunk of appended text takes. Recomputed blocks have more tokens."""
        tokens = len(step.ids) if isinstance(step, Read) else BLOCK * len(request.blocks)
        if not self._running or not tokens:
            return request.layers
        return max(1, request.layers * self._config.append_chunk_tokens // tokens)

    async def _begin_answer(self, request: DecodeRequest) -> None:
        if request.left:
            await self._sample_first([request])
            return
        self._before_first(request)
        request.close(FinishReason.LENGTH, "")

    def _work(
        self, request: DecodeRequest, step: Step, layers: range, last: bool
    ) -> Callable[[], ReadResult]:
        pages, part = request.pages.table, None
        if len(layers) < request.layers:
            part = ReadPart(request.serial, layers)
            self._begun.add(request)
        if isinstance(step, Recompute):  # a Read came before, so the KV of all layers is there
            question, ids, blocks = step.question, request.ids_of_blocks(), request.blocks
            if not blocks:
                return lambda: self._runner.append(pages, question, last)
            return lambda: self._runner.recompute(pages, blocks, ids, question, last, part)
        copy = request.pages.copy_in if step.start == request.pages.held_tokens else None
        states, own = None, request.pages.states
        if own is not None:
            states = ReadStates(own.first(step.start), own.cuts(step.start, step.end))
        return lambda: self._runner.append(pages, step, last, copy, part, states)

    async def _decode(self) -> None:
        """Run one decode step. On a GPU, launch the next step before this step's tokens are delivered.

        If an answer must match a grammar, the next step's mask depends on this step's token. The next forward
        pass is then launched first, and the masks are computed while it runs.
        """
        launched, self._ahead = self._ahead, None
        began = self._clock()
        requests = tuple(self._running) if launched is None else launched.requests
        stepping = frozenset(requests)
        following = self._to_launch_ahead(stepping)
        rows = [] if launched is not None else [request.row for request in requests]
        next_rows = [
            replace(request.row, length=request.length + (request in stepping)) for request in following
        ]
        for request, row in (*zip(requests, rows, strict=False), *zip(following, next_rows, strict=True)):
            if request.pages.states is not None:
                request.pages.states.step(row.length + 1)

        def work() -> tuple[list[SampledToken], LaunchedStep | None]:
            step = self._runner.launch(rows, _masks(requests)) if launched is None else launched.step
            if all(request.grammar is None for request in following):
                ahead = self._runner.launch(next_rows) if next_rows else None
                _take(requests, chosen := step.chosen())
                return chosen, ahead
            self._runner.forward(next_rows)
            _take(requests, chosen := step.chosen())
            return chosen, self._runner.choose(_masks(following))

        pages_in_use = _use_pages(following)
        every = list(dict.fromkeys((*requests, *following)))
        outcome = await self._computed("a decode step", every, work)
        self._last_step, self._turns_since_step = began, 0
        if launched is not None:
            launched.pages_in_use.close()
        chosen, ahead = outcome or ((), None)
        if ahead is None:
            pages_in_use.close()
        else:
            self._ahead = _LaunchedAhead(following, ahead, pages_in_use)
        live = [pair for pair in zip(requests, chosen, strict=False) if pair[0].ended is None]
        for request, choice in live:
            request.length += 1
            request.times.record_step(choice.pages_attended, choice.pages_held, len(live))
            self._deliver(request, choice)

    def _to_launch_ahead(self, stepping: Set[DecodeRequest]) -> tuple[DecodeRequest, ...]:
        """Return the requests of the step to launch before the tokens of this step are known; empty: none.

        A request whose last token this step samples is left out. Tokens that end an answer are not foreseen.

        Args:
            stepping: The requests of this step.
        """
        if not self._runner.asynchronous or self._stopping or self._gap_s() or self._next_to_read():
            return ()
        if self._waiting and self.running < self._config.max_batch:
            return ()
        following = tuple(one for one in self._running if one not in stepping or one.left > 1)
        if frozenset(following) != stepping and any(one.so_far is not None for one in following):
            return ()  # what their options count is uploaded anew, with this step's tokens
        return following

    async def _computed(
        self, kind: str, requests: Sequence[DecodeRequest], work: Callable[[], T]
    ) -> T | None:
        with _use_pages(requests):
            try:
                result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
                self._failures[kind] = 0
                return result
            except Exception as error:
                self._fail(kind, requests, error)
                return None

    def _fail(self, kind: str, requests: Sequence[DecodeRequest], error: Exception) -> None:
        text = f"{kind} failed: {type(error).__name__}: {error}"
        self._failures[kind] += 1
        if self._failures[kind] >= _FAILED_TURNS:
            self.fault = f"{self._failures[kind]} times in a row, {text}"
        for request in requests:
            request.close(FinishReason.FAILED, text)

    def _deliver(self, request: DecodeRequest, choice: SampledToken) -> None:
        if not math.isfinite(choice.logprob):
            text = "the model's logits are not finite numbers (in float16 its activations may overflow)"
            request.close(FinishReason.FAILED, text)
            return
        grammar = request.grammar
        if grammar is not None and grammar.trouble:  # the token may have been sampled without a mask
            request.close(FinishReason.GRAMMAR, grammar.trouble)
            return
        if request.produced == 0:
            self._before_first(request)
        assert request.job is not None
        sampling = request.job.sampling
        request.events.put_nowait(
            Token(
                index=request.produced,
                token_id=choice.token,
                logprob=choice.logprob,
                top=choice.top[: sampling.top_logprobs],
            )
        )
        request.token = choice.token
        request.answer_ids.append(choice.token)
        request.produced += 1
        if request.produced == 1:
            request.cache_prefix()
        complete = grammar is not None and grammar.ended
        ends = choice.token in self._eos_ids and not sampling.ignore_eos
        if complete or ends or choice.token in sampling.stop_token_ids:
            request.close(FinishReason.STOP, "")
        elif request.left == 0:
            request.close(FinishReason.LENGTH, "")


def _masks(requests: Sequence[DecodeRequest]) -> Sequence[Mask | None]:
    """Return each request's mask of allowed tokens (None: all tokens); empty if no request has a grammar."""
    if all(request.grammar is None for request in requests):
        return ()
    return [None if request.grammar is None else request.grammar.mask() for request in requests]


def _take(requests: Sequence[DecodeRequest], chosen: Sequence[SampledToken]) -> None:
    for request, choice in zip(requests, chosen, strict=True):
        if request.grammar is not None:
            request.grammar.take(choice.token)


def _use_pages(requests: Sequence[DecodeRequest]) -> ExitStack:
    pages_in_use = ExitStack()
    for request in requests:
        pages_in_use.enter_context(request.pages.use())
    return pages_in_use
