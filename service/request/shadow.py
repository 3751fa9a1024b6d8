"""Compares sampled answers with dense attention while the service runs. An idle decode worker prefills the
prompt and the answer again, with dense attention, and the log-probabilities are compared.

No caller waits for this. It begins only on a worker without requests, and the worker ends it when one comes.
It belongs to no caller, writes no line about a text, and its KV does not enter the prefix cache.
"""

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from deltafront.kernels.methods import is_exact
from deltafront.service.errors import WorkerError, WorkerFailed
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.fleet.fleet_view import FleetView
from deltafront.service.metrics import Metrics, ShadowOutcome
from deltafront.service.request.calls import Call, pack_ids
from deltafront.workers.messages import events, requests
from deltafront.workers.roles import DecodeWorker

log = logging.getLogger(__name__)

_PATIENCE_S = 600.0
"""Seconds that a complete answer waits for an idle worker."""


@dataclass(frozen=True)
class Comparison:
    """Compares an answer's log-probabilities as generated with those of dense attention.

    Attributes:
        given_nats, dense_nats: The sum of the tokens' negative log-probabilities.
        agreement: The share of positions where both have the same likeliest token; None: it is not known
            which token was the likeliest when the answer was given.
    """

    tokens: int
    given_nats: float
    dense_nats: float
    agreement: float | None


def compared(given: Sequence[events.Token], dense: Sequence[events.Token], *, greedy: bool) -> Comparison:
    """Compare an answer's tokens with the same tokens prefilled densely. Without `greedy`, a token's
    likeliest alternative is known only from its `top`."""
    likeliest = [one.token_id if greedy else one.top[0].token_id for one in given if greedy or one.top]
    equal = sum(mine == other.top[0].token_id for mine, other in zip(likeliest, dense, strict=False))
    return Comparison(
        tokens=len(given),
        given_nats=-sum(one.logprob for one in given),
        dense_nats=-sum(one.logprob for one in dense),
        agreement=equal / len(given) if len(likeliest) == len(given) else None,
    )


def is_comparable(call: Call, prompt_tokens: int) -> bool:
    """Return whether dense attention can be compared: the whole prompt is known, the method is sparse at this
    length, and only the model determined the log-probabilities."""
    free = not call.options.constraint and not call.sampling.changes_logits
    whole = call.session_id is None and not call.answered and call.options.prompt_logprobs is None
    return free and whole and not is_exact(call.method, prompt_tokens)


def idle_worker(view: FleetView, tokens: int) -> str | None:
    """Choose the decode worker with the most pages that hold no cached block. None: no worker of the service
    is idle with enough free pages, or a prompt is waiting."""
    if any(group.running or group.waiting for group in view.groups.values()):
        return None
    idle = [
        worker
        for worker in view.workers.values()
        if not (worker.running or worker.waiting or worker.draining)
        and worker.pages_free * worker.page_tokens >= tokens
    ]
    return max(idle, key=lambda worker: worker.pages_free - worker.pages_remembered).name if idle else None


class ShadowReads:
    """Compares a door's sampled answers, one at a time.

    Args:
        share: The share of answers to compare.
        pause_s: Seconds between two looks for an idle worker.
    """

    def __init__(self, door: str, fleet: Fleet, metrics: Metrics, share: float, pause_s: float) -> None:
        self._door, self._fleet, self._metrics = door, fleet, metrics
        self._share, self._pause_s = share, pause_s
        self._task: asyncio.Task[None] | None = None

    def sample(self) -> list[events.Token] | None:
        """Return a list for the tokens of a request's answer; None for a request that is not sampled."""
        return [] if random.random() < self._share else None

    def offer(self, call: Call, prompt: bytes, given: Sequence[events.Token] | None) -> None:
        """Compare a sampled request's complete answer later, if it can be compared and no other is waiting.

        Args:
            prompt: Little-endian uint32.
        """
        if not given or not is_comparable(call, len(prompt) // requests.ID_BYTES):
            return
        if self._task is not None and not self._task.done():
            self._metrics.count_shadow(ShadowOutcome.SKIPPED)
            return
        self._task = self._fleet.spawn(
            self._run(call.method.name, not call.sampling.temperature, prompt, given)
        )

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, method: str, greedy: bool, prompt: bytes, given: Sequence[events.Token]) -> None:
        try:
            outcome = await self._compare(method, greedy, prompt, given)
        except TimeoutError:
            outcome = ShadowOutcome.EXPIRED
        except WorkerError as error:
            log.warning("an answer was not compared with dense attention: %s", error.message)
            outcome = ShadowOutcome.FAILED
        self._metrics.count_shadow(outcome)

    async def _compare(
        self, method: str, greedy: bool, prompt: bytes, given: Sequence[events.Token]
    ) -> ShadowOutcome:
        async with asyncio.timeout(_PATIENCE_S):
            dense = await self._read(prompt, [one.token_id for one in given])
        if dense is None:
            return ShadowOutcome.ENDED
        self._metrics.observe_shadow(method, **vars(compared(given, dense, greedy=greedy)))
        return ShadowOutcome.COMPARED

    async def _read(self, prompt: bytes, answer: Sequence[int]) -> list[events.Token] | None:
        """Wait for an idle worker, and have it prefill the prompt and answer. Returns None if another request
        came first. Raises WorkerError."""
        ids, first = prompt + pack_ids(answer), len(prompt) // requests.ID_BYTES
        while True:
            await asyncio.sleep(self._pause_s)
            name = idle_worker(self._fleet.view, first + len(answer))
            if name is None:
                continue
            worker, request_id = self._fleet.worker(name), f"shadow~{uuid.uuid4().hex[:12]}"
            self._fleet.hold_lease(worker, request_id)
            try:
                reserved = await worker.reserve(self._reservation(request_id, first, len(answer)))
                if isinstance(reserved, requests.Reserved):
                    return await _dense_tokens(worker, request_id, ids, first)
            finally:
                self._fleet.cancel(worker, request_id)

    def _reservation(self, request_id: str, first: int, count: int) -> requests.Reservation:
        """Reserve without owner and prefix-cache key: no caller's quota counts it, and nothing is cached."""
        return requests.Reservation(
            request_id=request_id,
            owner="",
            new_tokens=first + count,
            max_tokens=0,
            options=requests.RequestOptions(prompt_logprobs=1, logprobs_from=first, shadow=True),
            door=self._door,
            reads_rest=True,
        )


async def _dense_tokens(
    worker: DecodeWorker, request_id: str, ids: bytes, first: int
) -> list[events.Token] | None:
    """Return the tokens from position `first` on, with their dense log-probabilities."""
    job = requests.GenerateJob(
        request_id=request_id, sampling=requests.Sampling(max_tokens=0), extend_ids=ids
    )
    found = list[events.Token]()
    async for event in worker.generate(job):
        if isinstance(event, events.PromptLogprobs):
            found += [token for token in event.tokens if token.index >= first]
        elif isinstance(event, events.FinishEvent):
            if event.reason is events.FinishReason.CANCELLED:
                return None
            whole = first + len(found) == len(ids) // requests.ID_BYTES
            if whole and all(math.isfinite(token.logprob) for token in found):
                return found
            raise WorkerFailed(worker.name, event.message or "log-probabilities are missing or not finite")
    raise WorkerFailed(worker.name, f"{worker.name} ended without a result")
