"""Tests the chunks of a prompt that another group resumes."""

from __future__ import annotations

import pytest

from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.workers.messages.requests import PrefillJob
from deltafront.workers.prefill.group.chunks import ChunkSizes
from deltafront.workers.prefill.group.request_table import Request


class Uneven(ChunkSizes):
    """Chunk sizes that depend on where a chunk begins, as in a planned cut."""

    def of(self, method: MethodSpec, start: int, tokens: int) -> tuple[int, ...]:
        return (512, 256, tokens - 768) if start == 0 else (tokens - start,)


@pytest.mark.parametrize(
    ("start", "cut"), [(0, [512, 256, 232]), (512, [256, 232]), (768, [232]), (640, [360])]
)
def test_resumed_prompt_is_cut_at_the_same_tokens_as_a_new_one(start: int, cut: list[int]) -> None:
    """If no chunk of that cut begins at the start token, the cut is made from there."""
    job = PrefillJob(
        request_id="a",
        token_ids=bytes(4000),
        method=method_spec("dense"),
        decode_worker="decode:x",
        start=start,
    )
    request = Request(job, 2, 0.0, 1)
    request.pages = (1, 2, 3)
    assert request.open_request().start == start
    assert request.waiting.remaining == 1000 - start
    chunks = []
    while request.unsent:
        chunks.append(request.next_chunk(Uneven(512)))
    assert [chunk.tokens for chunk in chunks] == cut
    assert [chunk.start for chunk in chunks] == [start + sum(cut[:n]) for n in range(len(cut))]
    assert [chunk.last for chunk in chunks] == [False] * (len(cut) - 1) + [True]
