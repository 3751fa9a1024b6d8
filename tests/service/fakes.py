"""Fake workers without a model, in this process or as Ray actors.

The next token is a letter chosen by a checksum of all tokens before it, so a replay that loses or repeats a
token changes the answer. Pages are counted like those of real workers.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltafront.kernels.constants import BLOCK
from deltafront.workers.messages.events import (
    ChunkRead,
    DecodeReport,
    FinishEvent,
    FinishReason,
    FirstTokenTimings,
    LayerDensity,
    PrefillDone,
    PrefillQueued,
    PrefillReport,
    Prefix,
    PromptLogprobs,
    Session,
    SessionKept,
    Token,
    TokenLogprob,
)
from deltafront.workers.messages.prompts import PromptKey, links_of
from deltafront.workers.messages.requests import (
    DecodeFailed,
    GenerateJob,
    KeepSession,
    PrefillFailed,
    PrefillJob,
    RefusalReason,
    Refused,
    Reservation,
    Reserved,
    Sampling,
    recompute_pages,
)
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.states import NAMESPACE, DecodeStats, GroupStats, OwnerUse
from deltafront.workers.model.grammars import Grammars, GrammarState
from deltafront.workers.roles import PrefillEvent

PAGE = 16
EOS = 257


def next_token(ids: bytes) -> int:
    """Choose the next token: a lower-case letter of the byte-level test tokenizer, or a space."""
    choice = zlib.crc32(ids) % 27
    return 32 if choice == 26 else 97 + choice


def follow(grammar: GrammarState | None, token: int) -> int:
    """Return the token if the grammar permits it, else another one."""
    if grammar is None:
        return token
    mask = grammar.mask()
    assert mask is not None
    allowed = [number for number in range(32 * len(mask)) if mask[number // 32] >> number % 32 & 1]
    chosen = token if token in allowed else allowed[token % len(allowed)]
    grammar.take(chosen)
    return chosen


def _ends(sampling: Sampling, token: int) -> bool:
    return token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)


def _measured(job: GenerateJob, top: int) -> PromptLogprobs:
    """Return a prompt's tokens, each of the log-probability -id/100, which is the highest."""
    ids = memoryview(job.extend_ids).cast("I").tolist()
    prompt = list(enumerate(ids[: len(ids) - job.answered_tokens]))[1:]
    tokens = (
        Token(
            index=index,
            token_id=token,
            logprob=-token / 100,
            top=tuple(TokenLogprob(token_id=(token + n) % 256, logprob=-token / 100 - n) for n in range(top)),
        )
        for index, token in prompt
    )
    return PromptLogprobs(tokens=tuple(tokens))


def _top(token: int, count: int) -> tuple[TokenLogprob, ...]:
    """Return the token itself and the ids after it, each less likely."""
    return tuple(TokenLogprob(token_id=(token + n) % 256, logprob=-0.5 - n) for n in range(count))


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def needed(reservation: Reservation, before: int = 0) -> int:
    """Count the pages of a reservation. before: tokens of inexact KV before it."""
    again = before + (0 if reservation.reads else reservation.new_tokens)
    own = recompute_pages(reservation.options.recompute_blocks, again, appended=reservation.reads)
    return pages(reservation.new_tokens + reservation.resume_tokens + reservation.max_tokens) + own


@dataclass
class Speed:
    """Seconds per chunk and per token."""

    chunk: float = 0.002
    token: float = 0.001


class Pausing:
    """Work that stops after `pause_at` chunks or tokens until `pause_at` changes or the request is cancelled.
    `paused`: the work has stopped. So a test does not depend on the machine's speed."""

    def __init__(self) -> None:
        self.pause_at = -1
        self.paused = threading.Event()

    async def _pause(self, count: int, cancelled: Callable[[], bool]) -> None:
        while count == self.pause_at and not cancelled():
            self.paused.set()
            await asyncio.sleep(0.005)


class FakeGroup(Pausing):
    """A fake `Group`. deliver(decode_worker, request_id, ids, attempt) hands over the prompt instead of KV.

    fail_after: the numbers of chunks after which to raise `failure`, one for each failure. busy: the errors
    with which to refuse the next jobs. full_with: the refusal of its queue, which then looks full.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[str, str, bytes, int], Any],
        total: int = 4096,
        speed: Speed | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.total = total
        self.speed = speed or Speed()
        self.fail_after: list[int] = []
        self.failure = PrefillFailed("a stage died")
        self.busy: list[Refused] = []
        self.full_with: Refused | None = None
        self.chunk_tokens = 128
        self.rate = self.fetch_rate = 0.0
        self.waiting_tokens = 0
        self.jobs: list[PrefillJob] = []
        self.chunks_read: list[int] = []
        self.renewed: list[tuple[str, ...]] = []
        self.cancelled: list[str] = []
        self._deliver = deliver
        self._open: dict[str, int] = {}

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        self.jobs.append(job)
        if self.busy:
            yield self.busy.pop(0)
            return
        expected_s = (await self.stats()).expected_s(job.method.name, job.start, job.tokens, job.service_tier)
        if expected_s is not None:
            yield PrefillQueued(expected_s=expected_s)
        self._open[job.request_id] = pages(job.tokens)
        started, before = time.monotonic(), len(self.cancelled)
        failing = self.fail_after.pop(0) if self.fail_after else None
        try:
            for number, begin in enumerate(range(job.start, job.tokens, self.chunk_tokens)):
                if failing is not None and number >= failing:
                    raise self.failure
                await self._pause(number, lambda: job.request_id in self.cancelled[before:])
                await asyncio.sleep(self.speed.chunk)
                if job.request_id in self.cancelled[before:]:
                    raise PrefillFailed("it was cancelled")
                if job.deadline is not None and time.time() > job.deadline:
                    yield Refused(reason=RefusalReason.DEADLINE, message="too late")
                    return
                done = min(begin + self.chunk_tokens, job.tokens)
                self.chunks_read.append(done)
                yield ChunkRead(
                    tokens_done=done,
                    tokens_total=job.tokens,
                    so_far=self._report(job, done, time.monotonic() - started),
                )
            delivered = self._deliver(job.decode_worker, job.request_id, job.token_ids, job.attempt)
            if delivered is not None:
                await delivered
        finally:
            self._open.pop(job.request_id, None)
        yield PrefillDone(
            request_id=job.request_id, report=self._report(job, job.tokens, time.monotonic() - started)
        )

    def _report(self, job: PrefillJob, done: int, wall: float) -> PrefillReport:
        """Report ten tiles per layer; each stage has one layer. Layer 0 computes all tiles, layer 1 those of
        the first half."""
        tile = 10 / job.tokens
        read, early = done - job.start, max(0.0, min(done, job.tokens / 2) - job.start)
        stage = {"attention": 0.5 * wall, "scoring": 0.1 * wall, "projection": 0.3 * wall}
        density = tuple(
            LayerDensity(
                layer=layer,
                computed=computed * tile,
                causal=read * tile,
                attention=stage["attention"],
                choosing=stage["scoring"],
            )
            for layer, computed in enumerate((read, early))
        )
        return PrefillReport(
            queue=0.0,
            wall=wall,
            critical={**stage, "group_overhead": wall - sum(stage.values())},
            stages=(stage, stage),
            density=density,
            method=job.method.name,
            sampled_share=0.016,
            handoff_bytes=read * 100,
        )

    async def queue_refusal(self, tokens: int, tier: ServiceTier = ServiceTier.DEFAULT) -> Refused | None:
        return self.full_with

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def renew(self, request_ids: tuple[str, ...]) -> None:
        self.renewed.append(tuple(request_ids))

    async def stats(self) -> GroupStats:
        free, waiting = self.total - sum(self._open.values()), int(self.full_with is not None)
        return GroupStats(
            name=self.name,
            pages_total=self.total,
            pages_free=free,
            running=len(self._open),
            waiting=waiting,
            waiting_tokens=self.waiting_tokens,
            tokens_per_second=self.rate,
            max_waiting=waiting or None,
            fetched_tokens_per_second=self.fetch_rate,
        )


@dataclass
class _Request:
    """inexact: the prompt was prefilled with a sparse method."""

    reservation: Reservation
    pages: int
    ids: bytes = b""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    inexact: bool = False
    attempt: int = 0
    prefix: bytes = b""
    """Ids of the prompt's prefix hit."""
    entered: list[bytes] = field(default_factory=list)


class FakeDecode(Pausing):
    """A fake `DecodeWorker`.

    script: ids of the answer, instead of the checksum's. script_from: number of prompt tokens after which the
    script begins, for resumed answers; 0: where the job begins. fail_after: the numbers of tokens after which
    to report `failure`, one for each failure. busy: the errors with which to refuse the next reservations.
    remembers: whether prompts enter the prefix cache, whose pages count as free. grammars: for constrained
    answers.
    """

    grammars: Grammars | None = None

    remembers = True
    append_rate = 0.0
    host_tokens = disk_tokens = 0
    """The tokens of a prefix that `Reserved` reports as loaded from host memory."""

    def __init__(self, name: str, total: int = 4096, speed: Speed | None = None) -> None:
        super().__init__()
        self.name = name
        self.total = total
        self.speed = speed or Speed()
        self.script: list[int] = []
        self.script_from = 0
        self.fail_after: list[int] = []
        self.failure = FinishReason.FAILED
        self.renewed: list[tuple[str, ...]] = []
        self.cancelled: list[str] = []
        self.jobs: list[GenerateJob] = []
        self.kept: list[KeepSession] = []
        self.busy: list[Refused] = []
        self.reservations: list[Reservation] = []
        self.arrived: int | None = None
        """Tokens of a prompt that have arrived when its group dies; None: all that it has prefilled."""
        self.resumed: list[int] = []
        self._requests: dict[str, _Request] = {}
        self._sessions: dict[str, tuple[str, bytes, float]] = {}
        self._entries: dict[bytes, tuple[bytes, bool]] = {}
        """By root and link: the page's ids, and whether their KV is exact."""
        self._inexact: set[str] = set()
        """Sessions."""
        self._serial = 0

    async def deliver(self, request_id: str, ids: bytes, attempt: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.attempt == attempt:
            request.ids = ids
            request.arrived.set()

    def used(self) -> int:
        self._sessions = {k: v for k, v in self._sessions.items() if v[2] > time.time()}
        running = sum(one.pages for one in self._requests.values())
        return running + sum(pages(len(ids) // 4) for _owner, ids, _expires in self._sessions.values())

    async def reserve(self, reservation: Reservation) -> Reserved | Refused:
        self.reservations.append(reservation)
        if self.busy:
            return self.busy.pop(0)
        free, before, inexact, prefix = self.total - self.used(), 0, False, b""
        if reservation.prefix_tokens:
            assert reservation.key is not None
            prefix, exact = self._found(reservation.key)
            before, inexact = reservation.prefix_tokens, not exact
            prefix = prefix[: 4 * before]
            if len(prefix) < 4 * before:
                return Refused(reason=RefusalReason.NO_PREFIX, message="no such prefix")
        elif reservation.session_id is not None:
            session = self._sessions.get(reservation.session_id)
            if session is None or session[0] != reservation.owner:
                return Refused(reason=RefusalReason.NO_SESSION, message="no such session")
            before = len(session[1]) // 4
            inexact = reservation.session_id in self._inexact
        need = needed(reservation, before * inexact)
        if need > self.total:  # also if a door does not know the total yet
            message = f"{need} pages needed, {self.total} in all"
            return Refused(reason=RefusalReason.TOO_LARGE, message=message, needed=need, free=free)
        if need > free:
            return Refused(
                reason=RefusalReason.PAGES,
                message=f"{need} pages needed, {free} free",
                needed=need,
                free=free,
            )
        request = _Request(reservation, need, inexact=inexact, prefix=prefix)
        self._requests[reservation.request_id] = request
        host, disk = (self.host_tokens, self.disk_tokens) if reservation.prefix_tokens else (0, 0)
        return Reserved(pages=need, held_tokens=before, host_tokens=host, disk_tokens=disk)

    async def generate(
        self, job: GenerateJob
    ) -> AsyncIterator[PromptLogprobs | FirstTokenTimings | Token | FinishEvent]:
        request = self._requests.get(job.request_id)
        if request is not None and request.reservation.options.prompt_logprobs is not None:
            yield _measured(job, request.reservation.options.prompt_logprobs)
        async for event in self._answer(job):
            yield event

    async def _answer(self, job: GenerateJob) -> AsyncIterator[FirstTokenTimings | Token | FinishEvent]:
        self.jobs.append(job)
        request = self._requests.get(job.request_id)
        if request is None:
            yield FinishEvent(
                request_id=job.request_id,
                reason=FinishReason.FAILED,
                completion_tokens=0,
                report=DecodeReport(),
                message="not reserved",
            )
            return
        if not request.reservation.reads:
            await request.arrived.wait()
            assert len(job.extend_ids) == 4 * request.reservation.resume_tokens
            assert request.ids.startswith(request.prefix)
            ids = request.ids + job.extend_ids
            self._read(request, job.prompt_ids)
        elif request.reservation.session_id is None:
            assert job.prompt_ids in (b"", request.prefix)
            request.ids = ids = request.prefix + job.extend_ids
        else:
            assert not job.prompt_ids, "the session has its own"
            request.ids = ids = self._sessions[request.reservation.session_id][1] + job.extend_ids
        assert len(job.extend_ids) // 4 - job.answered_tokens >= request.reservation.reads, (
            "one of them is to be read"
        )
        grammar = self._grammar(request, job)
        failing = self.fail_after.pop(0) if self.fail_after else None
        reason, count, message = FinishReason.LENGTH, 0, ""
        while count < job.sampling.max_tokens:
            if failing is not None and count >= failing:
                reason, message = self.failure, "a hand-off failed"
                break
            await self._pause(count, lambda: request.cancelled)
            await asyncio.sleep(self.speed.token)
            if request.cancelled:
                reason = FinishReason.CANCELLED
                break
            deadline = request.reservation.options.deadline
            if deadline is not None and time.time() >= deadline:
                reason = FinishReason.DEADLINE
                break
            if count == 0:
                yield self._first(request, job)
                self._remember(request)
            place = len(ids) // 4 - self.script_from if self.script_from else count
            token = self.script[place] if place < len(self.script) else next_token(ids)
            token = follow(grammar, token)
            ids += token.to_bytes(4, "little")
            yield Token(index=count, token_id=token, logprob=-0.5, top=_top(token, job.sampling.top_logprobs))
            count += 1
            if grammar.ended if grammar else _ends(job.sampling, token):
                reason = FinishReason.STOP
                break
        self._requests.pop(job.request_id, None)
        if reason in (FinishReason.FAILED, FinishReason.NO_KV):
            for name in request.entered:
                self._entries.pop(name, None)
        report = DecodeReport(
            pages_attended=count,
            pages_held=2 * count,
            handoff_seconds=0.001,
            steps=count,
            own_steps=count / 4,
            recomputed_tokens=_recomputed(request),
        )
        yield FinishEvent(
            request_id=job.request_id, reason=reason, completion_tokens=count, report=report, message=message
        )

    def _grammar(self, request: _Request, job: GenerateJob) -> GrammarState | None:
        constraint = request.reservation.options.constraint
        if not constraint:
            return None
        assert self.grammars is not None, "this fake follows no grammar"
        answered = job.extend_ids[len(job.extend_ids) - 4 * job.answered_tokens :]
        return self.grammars.begin(constraint, [*memoryview(answered).cast("I")])

    def _read(self, request: _Request, prompt_ids: bytes) -> None:
        assert prompt_ids in (b"", request.ids)
        request.inexact = bool(prompt_ids)

    def _first(self, request: _Request, job: GenerateJob) -> FirstTokenTimings:
        again = _recomputed(request)
        report = DecodeReport(
            decode_wait=0.0001,
            recompute=1e-6 * again,
            first_step=0.0002,
            handoff_seconds=0.001,
            recomputed_tokens=again,
        )
        if not job.keep_tokens:
            return FirstTokenTimings(request_id=job.request_id, report=report)
        session = self._keep(request, job.keep_tokens)
        return FirstTokenTimings(request_id=job.request_id, report=report, session=session)

    def _remember(self, request: _Request) -> None:
        key = request.reservation.key
        if not self.remembers or key is None or not key.remembers:
            return
        exact = not request.inexact if request.reservation.reads else key.exact
        lasting = len(key.chain) * PAGE if request.reservation.reads or key.exact else key.lasting_tokens
        for page, link in enumerate(links_of(key.chain), start=1):
            if page * PAGE <= lasting:
                name = (key.exact_root if exact else key.root) + link
                if name not in self._entries:
                    self._entries[name] = request.ids[4 * PAGE * (page - 1) : 4 * PAGE * page], exact
                    request.entered.append(name)

    def _found(self, key: PromptKey) -> tuple[bytes, bool]:
        """Find a prompt's cached prefix: its ids, and whether their KV is exact."""
        ids, exact = list[bytes](), True
        for link in links_of(key.chain):
            found = self._entries.get(key.root + link) or self._entries.get(key.exact_root + link)
            if found is None:
                break
            ids.append(found[0])
            exact = exact and found[1]
        return b"".join(ids), exact

    def _keep(self, request: _Request, tokens: int) -> Session:
        self._serial += 1
        session_id = f"{self.name.removeprefix('decode:')}.s{self._serial}"
        expires = time.time() + request.reservation.options.keep_ttl_s
        self._sessions[session_id] = (request.reservation.owner, request.ids[: 4 * tokens], expires)
        if request.inexact:
            self._inexact.add(session_id)
        return Session(session_id=session_id, expires=expires, tokens=tokens)

    async def keep(self, keep: KeepSession) -> SessionKept | Refused:
        self.kept.append(keep)
        request = self._requests[keep.request_id]
        await request.arrived.wait()
        self._read(request, keep.prompt_ids)
        tokens = len(request.ids) // 4
        session = self._keep(request, tokens)
        self._remember(request)
        self._requests.pop(keep.request_id, None)
        return SessionKept(
            request_id=keep.request_id, session=session, report=DecodeReport(handoff_exposed=0.0001)
        )

    async def find_prefix(self, key: PromptKey) -> Prefix | None:
        ids, exact = self._found(key)
        return Prefix(tokens=len(ids) // 4, exact=exact) if ids else None

    async def resume(self, request_id: str, points: Sequence[int], attempt: int) -> int:
        if request_id not in self._requests:
            raise DecodeFailed(f"request {request_id} is not being read here")
        self._requests[request_id].attempt = attempt
        here = [point for point in points if self.arrived is None or point <= self.arrived]
        self.resumed.append(max(here, default=len(self._requests[request_id].prefix) // 4))
        return self.resumed[-1]

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.cancelled = True
            request.arrived.set()

    async def release_session(self, session_id: str, owner: str) -> bool:
        session = self._sessions.get(session_id)
        if session is None or session[0] != owner or session[2] <= time.time():
            return False
        del self._sessions[session_id]
        return True

    async def renew(self, request_ids: tuple[str, ...]) -> None:
        self.renewed.append(tuple(request_ids))

    async def stats(self) -> DecodeStats:
        free, sessions = self.total - self.used(), len(self._sessions)
        return DecodeStats(
            name=self.name,
            pages_total=self.total,
            pages_free=free,
            running=len(self._requests),
            waiting=0,
            sessions=sessions,
            page_tokens=PAGE,
            append_tokens_per_second=self.append_rate,
            uses=tuple(self._uses()),
        )

    def _uses(self) -> Iterator[OwnerUse]:
        reservations = [request.reservation for request in self._requests.values()]
        for owner, door in {(reservation.owner, reservation.door) for reservation in reservations}:
            mine = [
                reservation
                for reservation in reservations
                if (reservation.owner, reservation.door) == (owner, door)
            ]
            tokens = sum(reservation.new_tokens + reservation.max_tokens for reservation in mine)
            yield OwnerUse(owner=owner, door=door, requests=len(mine), tokens=tokens)
        for owner, ids, _expires in self._sessions.values():
            yield OwnerUse(owner=owner, door="", requests=0, tokens=len(ids) // 4)


def _recomputed(request: _Request) -> int:
    """Count the recomputed tokens, at most those of the prompt's blocks."""
    return BLOCK * request.reservation.options.recompute_blocks if request.inexact else 0


class GroupProcess(FakeGroup):
    """FakeGroup as a Ray actor."""

    def __init__(self, name: str) -> None:
        super().__init__(name, _deliver)

    async def configure(self, **attributes: Any) -> None:
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    async def seen(self, attribute: str) -> Any:
        return getattr(self, attribute)


class DecodeProcess(FakeDecode):
    """FakeDecode as a Ray actor. All tests of a module share it, so it has no prefix cache."""

    remembers = False

    async def configure(self, **attributes: Any) -> None:
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    async def seen(self, attribute: str) -> Any:
        return getattr(self, attribute)


def _deliver(worker: str, request_id: str, ids: bytes, attempt: int) -> Any:
    import ray

    return ray.get_actor(worker, namespace=NAMESPACE).deliver.remote(request_id, ids, attempt)
