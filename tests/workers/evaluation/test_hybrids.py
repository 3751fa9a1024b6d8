"""Evaluates a model with linear attention: every setting and sample begins at the right state."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, ReadStates
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.evaluation.answering import Together
from deltafront.workers.evaluation.comparison import MeasuredAnswer
from deltafront.workers.evaluation.paged import delta_plan, share_read
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import Setting, delta_config
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.model_files import ModelError

from ..tiny_hybrid import make_tiny_hybrid
from ..tiny_model import VOCAB, greedy, whole_stack

DENSE, SPARSE = Setting("dense"), Setting("streaming:min_tokens=0,window=128,sink=128")
NEW, ROOM = 9, 800


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def stack(directory: Path) -> LayerStack:
    return whole_stack(directory)


def drawn(tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=tokens))


def sample(ids: tuple[int, ...], question: tuple[int, ...]) -> Sample:
    return Sample(TaskPrompt("any", "0", "", "?", ("never",)), ids, question)


def answers(together: Together, settings: list[Setting], samples: list[Sample]) -> list[list[MeasuredAnswer]]:
    return together.answers(settings, samples, 256, NEW, lambda ids: ",".join(map(str, ids)))


@pytest.mark.parametrize("question", [(), drawn(50, 3)], ids=["prompt", "session"])
def test_answers_equal_transformers_and_those_of_one_sample_alone(
    stack: LayerStack, directory: Path, question: tuple[int, ...]
) -> None:
    """A second setting reuses the prefill, so states go back to its end."""
    samples = [sample(drawn(700, 1), question), sample(drawn(523, 2), question)]
    expected, together = greedy(directory, NEW), Together(stack, 2, ROOM)
    first, second = answers(together, [DENSE, DENSE], samples)
    for one, answer, again in zip(samples, first, second, strict=True):
        assert list(answer.ids) == expected([*one.ids, *question])
        assert (again.ids, again.logp) == (answer.ids, answer.logp) and answer.agreement == 1.0
    (sparse,) = answers(together, [SPARSE], samples)
    for one, answer in zip(samples, sparse, strict=True):
        ((alone,),) = answers(Together(stack, 1, ROOM), [SPARSE], [one])
        assert (answer.ids, answer.density) == (alone.ids, pytest.approx(alone.density))
        assert answer.logp == pytest.approx(alone.logp, abs=1e-4)
        assert answer.density < 1


def test_density_is_that_of_the_layers_with_attention(stack: LayerStack) -> None:
    reader = Reader(stack, ROOM)
    with torch.inference_mode():
        reading = reader.read(drawn(700, 1), SPARSE.method, 256)
    assert reading.density == pytest.approx((1 + 2 + 3 + 3 + 3 + 3) / 21)
    assert len(reading.runs) == stack.config.layers


def test_a_state_cannot_go_back_into_a_document(stack: LayerStack) -> None:
    reader = Reader(stack, ROOM)
    with torch.inference_mode():
        reading = reader.read(drawn(700, 1), "dense", 256)
        with pytest.raises(ModelError, match="after 512 tokens: its state has seen 700"):
            reader.read(drawn(700, 1), "dense", 256, after=512)
        with (
            pytest.raises(ModelError, match="linear attention cannot continue"),
            reader.end_again(reading, 2),
        ):
            pass


def test_page_selection_decodes_the_tokens_of_a_decode_worker(stack: LayerStack) -> None:
    """Layer 3 selects pages for layer 7, and the others have linear attention."""
    ids, pages = drawn(700, 1), tuple(range(45))
    setting = Setting.parse("dense/delta_layers=3,page_budget=3,recency=1")
    (full,), (delta,) = answers(Together(stack, 1, ROOM), [DENSE, setting], [sample(ids, ())])
    plan = delta_plan(stack, delta_config(setting.delta))
    assert share_read(plan, stack.config.kv_layers, 700) == (44 + 3) / 88
    runner = DecodeRunner(stack, plan, pages=45, max_batch=1, max_pages=45, state_slots=2)
    states = ReadStates(None, {700: (1,)})
    logits_V = runner.append(pages, Read(0, list(ids)), last=True, states=states).logits_V
    row = Row(1, pages, 700, 0, Sampling(), selects_pages=True, state=1)
    said = [one.token for one in runner.first_tokens([logits_V], [row])]
    while len(said) < NEW:
        (one,) = runner.decode([replace(row, length=699 + len(said), token=said[-1])])
        said.append(one.token)
    assert delta.ids == tuple(said) and full.ids != delta.ids
    assert delta.density == full.density and delta.agreement < full.agreement == 1
