"""Tests copies of a session's partly filled page that run as late as on a busy GPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from deltafront.workers.decode.step_rows import LaunchedStep
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.messages.requests import GenerateJob, Sampling
from deltafront.workers.messages.stages import FirstLogits
from deltafront.workers.model.decoder.stack import LayerStack

from ..prompts import SHORT, ids_of

LAST = Sampling(max_tokens=1, ignore_eos=True)


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queue page copies, as on a GPU's stream. They run when the compute thread next computes or waits for
    results. Returns the queue."""
    queue: list[tuple[int, int]] = []
    caches: list[PagedKVCache] = []
    copy, forward, chosen = PagedKVCache.copy_page, LayerStack.forward, LaunchedStep.chosen

    def asked(self: PagedKVCache, source: int, target: int) -> None:
        queue.append((source, target))
        caches.append(self)

    def flush() -> None:
        while queue and threading.current_thread().name.startswith("decode-compute"):
            copy(caches.pop(0), *queue.pop(0))

    def flushed_forward(*args: Any) -> Any:
        flush()
        return forward(*args)

    def flushed_chosen(*args: Any) -> Any:
        flush()
        return chosen(*args)

    monkeypatch.setattr(PagedKVCache, "copy_page", asked)
    monkeypatch.setattr(LayerStack, "forward", flushed_forward)
    monkeypatch.setattr(LaunchedStep, "chosen", flushed_chosen)
    return queue


async def fill_free_pages(run: Any) -> None:
    """Write another prompt's KV to all free pages."""
    prompt = (await run.engine.stats()).pages_free * 16 - 1
    await run.reserve("other", prompt, 1)
    made = run.prefill(ids_of(prompt))
    for piece in run.pieces("other", made):
        await run.engine.announce(piece)
    await run.engine.first_logits(FirstLogits(request_id="other", logits=made.logits))


async def test_page_copy_survives_the_end_of_its_session(bench: Any, late_copies: list[Any]) -> None:
    run = await bench(cache_tokens=640)
    session = (await run.ask("a", ids_of(40), SHORT, keep_tokens=40)).first.session.session_id
    wanted = await run.ask_session("alone", session, ids_of(10), SHORT)
    await run.reserve("q", 10, 8, session_id=session)
    assert await run.engine.release_session(session, "me")
    await fill_free_pages(run)
    packed = np.asarray(ids_of(10), dtype="<u4").tobytes()
    answer = await run.collect(GenerateJob(request_id="q", sampling=SHORT, extend_ids=packed))
    assert answer.ids == wanted.ids
    await run.engine.cancel("other")
    assert run.used == 0 and not late_copies


async def test_session_is_not_reported_before_its_last_page_is_copied(
    bench: Any, late_copies: list[Any]
) -> None:
    run = await bench(cache_tokens=640)
    kept = (await run.ask("first", ids_of(40), SHORT, keep_tokens=40)).first.session.session_id
    wanted = await run.ask_session("alone", kept, ids_of(10), SHORT)
    await run.engine.release_session(kept, "me")
    session = (await run.ask("a", ids_of(40), LAST, keep_tokens=40)).first.session.session_id
    assert not late_copies, "nothing of it is still to be done once the request may go"
    await run.reserve("q", 10, 8, session_id=session)
    await fill_free_pages(run)
    packed = np.asarray(ids_of(10), dtype="<u4").tobytes()
    assert (
        await run.collect(GenerateJob(request_id="q", sampling=SHORT, extend_ids=packed))
    ).ids == wanted.ids
    await run.engine.release_session(session, "me")
    await run.engine.cancel("other")
    assert run.used == 0
