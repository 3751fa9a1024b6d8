"""Tests prompts, answers and statistics of `benchmarks.lab`, on a tiny model with random weights."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from deltafront.benchmarks.lab.samples import ruler_prompts, tokenised
from deltafront.tests.workers.tiny_model import make_tiny_model, whole_stack
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.evaluation.answering import Together
from deltafront.workers.evaluation.comparison import compare
from deltafront.workers.evaluation.paged import delta_plan
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import Setting, delta_config
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.stack import LayerStack

SPARSE = "streaming:min_tokens=0,window=128"


def decode(ids: object) -> str:
    return ",".join(map(str, ids))  # type: ignore[call-overload]


def sample(ids: tuple[int, ...], name: str = "0", question: tuple[int, ...] = ()) -> Sample:
    return Sample(TaskPrompt("any", name, "", "?", ("never",)), ids, question)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> LayerStack:
    directory: Path = make_tiny_model(tmp_path_factory.mktemp("lab") / "model")
    return whole_stack(directory)


def ids_of(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 60) for _ in range(count))


@pytest.mark.parametrize("shared", [0, 1, 4, 9])
@pytest.mark.parametrize("given", ["dense", "streaming:min_tokens=0,window=128@3"])
def test_answer_does_not_depend_on_the_answer_that_is_told(
    stack: LayerStack, given: str, shared: int
) -> None:
    """The answer that is told begins with `shared` tokens of the own one, from which decode then goes on."""
    setting, prompts = Setting.parse(given), [sample(ids_of(length, length)) for length in (700, 523)]
    together = Together(stack, 2, 720)
    (own,) = together.answers([setting], prompts, 256, 9, decode)
    told = [(*answer.ids[:shared], *(1 + (id + 1) % 60 for id in answer.ids[shared:])) for answer in own]
    (again,) = together.answers([setting], prompts, 256, 9, decode, told)
    for answer, same in zip(own, again, strict=True):
        assert same.ids == answer.ids and len(answer.ids) == 9
        assert same.agreement >= shared / 9
    if shared == 9:
        assert [answer.logp for answer in again] == pytest.approx([answer.logp for answer in own])


@pytest.mark.parametrize("given", ["dense", "streaming:min_tokens=0,window=128@3", "dpxa:min_tokens=0@0"])
def test_batched_answers_equal_answers_one_by_one(stack: LayerStack, given: str) -> None:
    setting = Setting.parse(given)
    prompts = [sample(ids_of(length, n), str(n)) for n, length in enumerate((700, 523))]
    (together,) = Together(stack, 2, 720).answers([setting], prompts, 256, 9, decode)
    for prompt, answer in zip(prompts, together, strict=True):
        ((alone,),) = Together(stack, 1, 720).answers([setting], [prompt], 256, 9, decode)
        assert answer.said == alone.said and answer.density == pytest.approx(alone.density)
        if given == "dense":
            reader, said = Reader(stack, 720), list[int]()
            hidden_1C = reader.read(prompt.ids, "dense", 256).tail_TC
            for _ in range(9):
                said.append(int(stack.logits(hidden_1C)[0].argmax()))
                hidden_1C = reader.append(said[-1:])
            assert answer.said == decode(said)


def test_prefills_the_last_prompt_tokens_a_second_time_densely(stack: LayerStack) -> None:
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
                assert again.density == sparse.density
            assert torch.equal(reader.document(1)[0][:, :640], before)
        assert not torch.allclose(sparse.tail_TC, dense.tail_TC, rtol=1e-3, atol=1e-3)


def test_reuses_one_prefill_for_all_numbers_of_recomputed_blocks(stack: LayerStack) -> None:
    prompts, together = [sample(ids_of(700))], Together(stack, 1, 720)
    settings = [Setting(SPARSE, blocks) for blocks in (0, 2, 9)]
    (none,), (two,), (all_blocks,) = together.answers(settings, prompts, 256, 9, decode)
    for blocks, answer in ((0, none), (2, two), (9, all_blocks)):
        ((alone,),) = together.answers([Setting(SPARSE, blocks)], prompts, 256, 9, decode)
        assert (answer.ids, answer.density, answer.logp) == (alone.ids, alone.density, alone.logp)
    assert all_blocks.density == two.density == none.density < 1
    assert len({none.logp, two.logp, all_blocks.logp}) == 3


def test_measures_log_probability_of_dense_attentions_answer(stack: LayerStack) -> None:
    prompts = [sample(ids_of(700))]
    together, reader, expected = Together(stack, 1, 720), Reader(stack, 720), list[float]()
    ((dense,),) = together.answers([Setting("dense")], prompts, 256, 9, decode)
    ((sparse,),) = together.answers([Setting(SPARSE)], prompts, 256, 9, decode, [dense.ids])
    hidden_1C = reader.read(prompts[0].ids, SPARSE, 256).tail_TC
    for token in dense.ids:
        expected.append(float(stack.logits(hidden_1C)[0].log_softmax(-1)[token]))
        hidden_1C = reader.append([token])
    assert sparse.logp == pytest.approx(fmean(expected), abs=1e-4) and sparse.logp != dense.logp
    assert dense.agreement == 1.0
    row = compare(SPARSE, [prompts[0].prompt], [sparse], [dense])
    assert row.logp == sparse.logp - dense.logp and row.same == (sparse.said == dense.said)


def test_int8_rounds_keys_and_values_in_prefill_and_decode(stack: LayerStack) -> None:
    setting, ids = Setting.parse("dense/kv_dtype=int8"), ids_of(700)
    together, reader = Together(stack, 1, 720), Reader(stack, 720, kv_dtype="int8")
    ((dense,),) = together.answers([Setting("dense")], [sample(ids)], 256, 9, decode)
    ((rounded,),) = together.answers([setting], [sample(ids)], 256, 9, decode, [dense.ids])
    with torch.inference_mode():
        hidden_1C, expected = reader.read(ids, "dense", 256).tail_TC, list[float]()
        for token in dense.ids:
            expected.append(float(stack.logits(hidden_1C)[0].log_softmax(-1)[token]))
            hidden_1C = reader.append([token])
    assert rounded.logp == pytest.approx(fmean(expected), abs=1e-4)
    assert abs(rounded.logp - dense.logp) > 1e-3
    ((again,),) = together.answers([Setting("dense")], [sample(ids)], 256, 9, decode)
    assert again.ids == dense.ids and again.logp == dense.logp


@pytest.mark.parametrize("blocks", [0, 9])
def test_question_on_a_session_is_prefilled_densely(stack: LayerStack, blocks: int) -> None:
    """With every block recomputed, as after dense prefill of all; the last block is sparse otherwise."""
    document, question = ids_of(640), ids_of(90, 1)
    together, reader = Together(stack, 1, 760), Reader(stack, 760)
    asked = sample(document, question=question)
    ((answer,),) = together.answers([Setting(SPARSE, blocks)], [asked], 256, 9, decode)
    with torch.inference_mode():
        reader.read(document, "dense" if blocks else SPARSE, 256)
        hidden_1C, said = reader.append(question)[-1:], list[int]()
        for _ in range(9):
            said.append(int(stack.logits(hidden_1C)[0].argmax()))
            hidden_1C = reader.append(said[-1:])
    assert answer.ids == tuple(said)
    assert answer.density == reader.read(document, SPARSE, 256).density


def test_page_selection_decodes_the_tokens_of_a_decode_worker(stack: LayerStack) -> None:
    ids, pages = ids_of(700), tuple(range(45))
    setting = Setting.parse("dense/delta_layers=2,full_layers=0+1,page_budget=6,recency=2")
    together, given = Together(stack, 1, 720), [sample(ids)]
    (full,), (delta,) = together.answers([Setting("dense"), setting], given, 256, 9, decode)
    runner = DecodeRunner(
        stack, delta_plan(stack, delta_config(setting.delta)), pages=45, max_batch=1, max_pages=45
    )
    logits_V = runner.append(pages, Read(0, list(ids)), last=True).logits_V
    row = Row(1, pages, 700, 0, Sampling(), selects_pages=True)
    said = [one.token for one in runner.first_tokens([logits_V], [row])]
    while len(said) < 9:
        (one,) = runner.decode([replace(row, length=699 + len(said), token=said[-1])])
        said.append(one.token)
    assert delta.ids == tuple(said) != full.ids
    assert delta.agreement < full.agreement == 1 and delta.density == full.density


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "no page selection ''"),
        ("page_budget=8+9", "no page selection"),
        ("page_budget=4", "exceeds page_budget"),
        ("delta_layers=1", r"full_layers and delta_layers share \[1\]"),
        ("delta_layers=9", "delta_layers"),
        ("page_budget=64", "needs calibrated delta_layers"),
    ],
)
def test_refuses_wrong_page_selections(stack: LayerStack, given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        delta_plan(stack, delta_config(Setting.parse(f"dense/{given}").delta))


def test_lab_accepts_ruler_prompts_and_prompt_files(tmp_path: Path) -> None:
    text, tokenizer = tmp_path / "prose.txt", Tokenizer(WordLevel({"w": 0}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text.write_text(" ".join(f"Sentence {n} tells of nothing." for n in range(90)))
    made = ruler_prompts(["multikey_1", "multivalue"], 2, 1500, [text], tokenizer, seed=3)
    assert [one.task for one in made] == ["multikey_1"] * 2 + ["multivalue"] * 2
    assert len({one.source for one in made}) == 4
    for one, tokens in zip(made, tokenised(made, tokenizer), strict=True):
        assert 1400 < tokens.tokens == len(one.text.split()) <= 1500
    assert ruler_prompts(["multivalue"], 1, 1500, [text], tokenizer, seed=4)[0] != made[2]
