"""Tests prompts, answers and statistics of `benchmarks.lab`, on a tiny model with random weights."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import fmean

import pytest
import torch

from deltafront.benchmarks.lab.reading import Case, Together
from deltafront.benchmarks.lab.samples import Sample, samples
from deltafront.benchmarks.lab.table import Compared, ratio_interval, row, t_quantile, table
from deltafront.benchmarks.reader import Reader
from deltafront.tests.workers.tiny_model import make_tiny_model, whole_stack
from deltafront.workers.calibration.probes import Text
from deltafront.workers.model.decoder.stack import LayerStack


def _ids(text: str) -> list[int]:
    return list(text.encode())


def _decode(ids: object) -> str:
    return bytes(ids).decode()  # type: ignore[call-overload]


SENTENCES = " ".join(f"Sentence {n} tells of nothing." for n in range(600))
TEXT = Text(SENTENCES, lambda texts: [_ids(text) for text in texts])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> LayerStack:
    directory: Path = make_tiny_model(tmp_path_factory.mktemp("lab") / "model")
    return whole_stack(directory)


def ids_of(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 60) for _ in range(count))


def test_a_sample_ends_in_one_question_and_contains_its_answers() -> None:
    tasks = ["single_2", "multikey_1", "multikey_2", "multivalue", "multiquery", "variables"]
    made = samples(tasks, 2, 4000, {"prose": TEXT}, _decode, seed=3)
    assert [sample.task for sample in made] == [task for task in tasks for _ in range(2)]
    for sample in made:
        text = _decode(sample.ids)
        assert 3500 < len(sample.ids) <= 4000 + 256  # ids are bytes, so questions exceed their reserve
        assert len(sample.answers) == {"multivalue": 4, "multiquery": 4, "variables": 5}.get(sample.task, 1)
        assert all(answer in text for answer in sample.answers)
        assert sample.score(" ".join(sample.answers)) == 1.0 and sample.score("none") == 0.0
    assert samples(["multivalue"], 1, 4000, {"prose": TEXT}, _decode, seed=4)[0] != made[6]


def test_samples_ask_for_keys_anywhere_in_the_document() -> None:
    made = samples(["multikey_1"], 12, 3000, {"prose": TEXT}, _decode, seed=1)
    places = [_decode(sample.ids).index(sample.answers[0]) / len(sample.ids) for sample in made]
    assert min(places) < 0.3 and max(places) > 0.6


@pytest.mark.parametrize("case", ["dense", "streaming:min_tokens=0,window=128@3", "dpxa:min_tokens=0@0"])
def test_batched_answers_equal_answers_one_by_one(stack: LayerStack, case: str) -> None:
    given = Case.parse(case)
    prompts = [Sample("any", str(n), ids_of(length, n), ("never",)) for n, length in enumerate((700, 523))]
    decode = lambda ids: ",".join(map(str, ids))  # noqa: E731
    (together,) = Together(stack, 2, 720).answers(given.method, [given.blocks], prompts, 256, 9, decode)
    for prompt, answer in zip(prompts, together, strict=True):
        ((alone,),) = Together(stack, 1, 720).answers(given.method, [given.blocks], [prompt], 256, 9, decode)
        assert answer.said == alone.said and answer.density == pytest.approx(alone.density)
        if case == "dense":
            reader, said = Reader(stack, 720), list[int]()
            hidden_1C = reader.read(prompt.ids, "dense", 256).tail_TC
            for _ in range(9):
                said.append(int(stack.logits(hidden_1C)[0].argmax()))
                hidden_1C = reader.append(said[-1:])
            assert answer.said == decode(said)


def test_prefills_the_prompts_end_again_densely(stack: LayerStack) -> None:
    """After dense prefill the result does not change. After sparse prefill with all blocks recomputed it
    equals that of dense prefill."""
    ids, reader = ids_of(900), Reader(stack, 900)
    with torch.inference_mode():
        dense = reader.read(ids, "dense", 256)
        for method in ("dense", "streaming:min_tokens=0,window=128"):
            sparse = reader.read(ids, method, 256)
            before = reader.document(1)[0][:, :640].clone()
            with reader.end_again(sparse, 16) as again:
                torch.testing.assert_close(again.tail_TC, dense.tail_TC, rtol=1e-3, atol=1e-3)
                assert again.density > sparse.density
            assert torch.equal(reader.document(1)[0][:, :640], before)
        assert not torch.allclose(sparse.tail_TC, dense.tail_TC, rtol=1e-3, atol=1e-3)


def test_answers_one_prefill_with_each_number_of_recomputed_blocks(stack: LayerStack) -> None:
    prompts, decode = [Sample("any", "0", ids_of(700), ("never",))], lambda ids: ",".join(map(str, ids))
    method, together = "streaming:min_tokens=0,window=128", Together(stack, 1, 720)
    (none,), (two,), (all_blocks,) = together.answers(method, [0, 2, 9], prompts, 256, 9, decode)
    for blocks, answer in ((0, none), (2, two), (9, all_blocks)):
        ((alone,),) = together.answers(method, [blocks], prompts, 256, 9, decode)
        assert (answer.ids, answer.density, answer.logp) == (alone.ids, alone.density, alone.logp)
    assert all_blocks.prefill == two.prefill == none.density < two.density < all_blocks.density
    assert len({none.logp, two.logp, all_blocks.logp}) == 3


def test_measures_log_probability_of_dense_attentions_answer(stack: LayerStack) -> None:
    prompts, decode = [Sample("any", "0", ids_of(700), ("never",))], lambda ids: ",".join(map(str, ids))
    together, reader, expected = Together(stack, 1, 720), Reader(stack, 720), list[float]()
    ((dense,),) = together.answers("dense", [0], prompts, 256, 9, decode)
    method = "streaming:min_tokens=0,window=128"
    ((sparse,),) = together.answers(method, [0], prompts, 256, 9, decode, [dense.ids])
    hidden_1C = reader.read(prompts[0].ids, method, 256).tail_TC
    for token in dense.ids:
        expected.append(float(stack.logits(hidden_1C)[0].log_softmax(-1)[token]))
        hidden_1C = reader.append([token])
    assert sparse.logp == pytest.approx(fmean(expected), abs=1e-4) and sparse.logp != dense.logp
    assert dense.agreement == 1.0
    compared = Compared(prompts)
    compared.add(Case("dense"), [dense])
    compared.add(Case(method), [sparse])
    assert compared.rows[1]["logp"] == sparse.logp - dense.logp


def test_result_row_counts_lost_and_won_answers() -> None:
    dense, scores = [1.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.75, 0.25]
    made = row("dpxa@8", ["a", "a", "b", "b"], scores, dense, [0.2] * 4, [1.0] * 4)
    assert (made["lost"], made["won"], made["ratio"]) == (1, 2, 0.8)
    assert made["by_task"] == {"a": 0.5, "b": 0.5}
    first = row("dense", ["a", "a", "b", "b"], dense, dense, [1.0] * 4, [1.0] * 4)
    assert "a 1.00 → 0.50" in table([first, made]) and "1 / 2 of 4" in table([first, made])


def test_confidence_intervals_cover_the_true_ratio() -> None:
    for degrees, expected in ((10, 2.2281), (30, 2.0423), (179, 1.9733)):  # published 0.975 quantiles
        assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=0.003)
    rng = random.Random(0)
    inside = 0
    for _ in range(400):
        dense = [float(rng.random() < 0.8) for _ in range(60)]
        scores = [d if rng.random() < 0.9 else float(rng.random() < 0.5) for d in dense]
        low, high = ratio_interval(scores, dense) or (math.nan, math.nan)
        inside += low <= (0.8 * 0.95 + 0.2 * 0.05) / 0.8 <= high
    assert fmean([inside / 400]) > 0.9
    assert ratio_interval([1.0], [1.0]) is None
