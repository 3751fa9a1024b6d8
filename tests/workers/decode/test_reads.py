"""Compares the plan of a decode worker's own prefill with a plain account of positions."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence

import pytest

from deltafront.kernels.constants import BLOCK
from deltafront.workers.decode.reads import Read, Recompute, next_layers, plan_reads, tail_start
from deltafront.workers.messages.requests import TAIL_TOKENS


def ids(count: int, first: int = 0) -> array[int]:
    return array("I", range(first, first + count))


@pytest.mark.parametrize("there", [1, 127, 128, 255, 256, 257, 383, 384, 1000])
@pytest.mark.parametrize("blocks", [0, 3])
def test_prefill_plan_repeats_only_the_questions_last_tokens(there: int, blocks: int) -> None:
    for asked, answered in itertools.product((0, 1, 47, 48, 49, 200), (0, 1, 60)):
        every = ids(there + asked + answered)
        steps = plan_reads(there, every[:there], every[there:], answered=answered, chunk=48, blocks=blocks)
        reads = [step for step in steps if isinstance(step, Read)]
        assert all(list(read.ids) == list(every[read.start : read.end]) for read in reads)
        tail = TAIL_TOKENS + BLOCK - 1
        assert all(0 < len(read.ids) <= (48 if asked or read.start >= there else tail) for read in reads)
        again = next((step for step in steps if isinstance(step, Recompute)), None)
        assert (again is None) == (not blocks or there < 2 * BLOCK)
        if again is None:  # only block 0 is complete, and it is never recomputed
            assert places(reads) == list(range(there, len(every)))
            assert len(reads) == len(steps)
            continue
        place = steps.index(again)
        looking, question = steps[place - 1], again.question
        assert isinstance(looking, Read)
        assert looking.select_blocks == blocks and question == Read(looking.start, looking.ids)
        assert looking.select_among == (there if asked else tail_start(there))
        assert [read.select_blocks for read in reads if read is not looking] == [0] * (len(reads) - 1)
        assert looking.end == there + asked, "the answer is no part of the question"
        assert not asked or len(looking.ids) == min(asked, 48), "as much of it as one read may have"
        first = there if asked else tail_start(there)
        assert places(reads) == list(range(first, len(every)))


def places(reads: Sequence[Read]) -> list[int]:
    return [place for read in reads for place in range(read.start, read.end)]


@pytest.mark.parametrize("tokens", [1, 128, 129, 255, 256, 300, 384, 4097])
def test_prompt_tail_begins_at_a_block_and_has_enough_tokens(tokens: int) -> None:
    start = tail_start(tokens)
    assert start % BLOCK == 0
    assert min(tokens, TAIL_TOKENS) <= tokens - start <= TAIL_TOKENS + BLOCK - 1


def test_recomputes_nothing_without_the_prompts_token_ids() -> None:
    assert plan_reads(500, (), ids(5), answered=0, chunk=48, blocks=4) == [Read(500, ids(5))]
    assert plan_reads(500, (), array("I"), answered=0, chunk=48, blocks=4) == []


@pytest.mark.parametrize("keep", [0, 500, 530, 560, 599])
@pytest.mark.parametrize("answered", [0, 7])
def test_session_tokens_are_prefilled_once_before_recomputation(keep: int, answered: int) -> None:
    every = ids(600 + answered)
    steps = plan_reads(500, every[:500], every[500:], answered=answered, chunk=48, blocks=3, keep_tokens=keep)
    place, again = next((n, step) for n, step in enumerate(steps) if isinstance(step, Recompute))
    first, after = (
        [step for step in part if isinstance(step, Read)] for part in (steps[:place], steps[place:])
    )
    second = [again.question, *after]
    assert places(first) == list(range(500, 600))
    assert min(places(second)) == max(600 - 48, keep) == first[-1].start
    assert places(second) == list(range(first[-1].start, 600 + answered))


def test_recomputes_nothing_if_the_session_keeps_all_appended_tokens() -> None:
    every = ids(600)
    plain = plan_reads(500, every[:500], every[500:], answered=0, chunk=48, blocks=0)
    assert plan_reads(500, every[:500], every[500:], answered=0, chunk=48, blocks=3, keep_tokens=600) == plain


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 32, 80])
def test_computes_layers_in_few_parts_as_their_kv_arrives(layers: int) -> None:
    """More layers may arrive while a part runs."""
    for seed in range(50):
        chance, read, parts = random.Random(seed), 0, list[range]()
        for here in sorted({*chance.choices(range(layers + 1), k=chance.randrange(2 * layers)), layers}):
            part = next_layers(read, here, layers)
            assert not part or (part.start == read and part.stop <= here)
            assert part or here < layers, "what has come is read to the end"
            read, parts = (part.stop, [*parts, part]) if part else (read, parts)
        assert [layer for part in parts for layer in part] == list(range(layers))
        assert len(parts) <= max(1, (layers - 1).bit_length())
