"""Tests answers of batched questions against those of single questions, and decode with page selection."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deltafront.benchmarks.accuracy import questions as batched
from deltafront.benchmarks.accuracy.decode import AnswerDecoder, parse_selection
from deltafront.benchmarks.accuracy.predictions import GAIN, LIKELY, key_tokens, short_logps, tail_logps
from deltafront.benchmarks.accuracy.quest import QuestAttention, QuestPlan
from deltafront.benchmarks.accuracy.questions import (
    Answered,
    ask,
    ask_in_prompt,
    ask_one_by_one,
    attend_appended,
    by_subject,
)
from deltafront.benchmarks.cases_decode import PROFILED
from deltafront.benchmarks.tables import RESULTS, ROOT
from deltafront.kernels.methods import MethodError
from deltafront.service.config import load
from deltafront.workers.calibration.probes import Question
from deltafront.workers.calibration.sensitivity import divergence
from deltafront.workers.decode.decode_attention import BatchRows, plan_layers
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import parse_method

from ..workers.profiles import make_profile
from ..workers.tiny_model import make_tiny_model, whole_stack

TOKENS = 400


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    made = Reader(whole_stack(directory), TOKENS + 64)
    with torch.inference_mode():
        made.read(ids(TOKENS, 1), "dense", 128)
    return made


def greedy(reader: Reader, prompt: list[int], count: int) -> list[int]:
    before, given = reader.length, []
    with torch.inference_mode():
        token = int(reader.next_logits(prompt).argmax())
        for _ in range(count):
            given.append(token)
            token = int(reader.next_logits([token]).argmax())
    reader.length = before
    return given


@pytest.fixture(scope="module")
def asked(reader: Reader) -> list[Question]:
    """Make questions of different lengths. Every second right answer is the model's greedy answer."""
    found = []
    for i in range(7):
        prompt, length = ids(5 + 3 * i, 10 + i), 1 + (4 * i) % 7
        gold = greedy(reader, prompt, length) if i % 2 else ids(length, 30 + i)
        found.append(Question(f"q{i}", tuple(prompt), tuple(gold)))
    return found


@pytest.mark.parametrize("rows", [batched.ROWS, 60, 1])
def test_batched_questions_get_the_answers_of_single_questions(
    reader: Reader, asked: list[Question], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "ROWS", rows)
    answers = ask(reader, asked)
    assert [answer.exact for answer in answers] == [i % 2 == 1 for i in range(7)]
    for question, answer in zip(asked, answers, strict=True):
        logp, exact = ask_one_by_one(reader, question)
        assert answer.logp == pytest.approx(logp, abs=1e-4)
        assert answer.exact == exact
    assert reader.length == TOKENS


@pytest.mark.parametrize(
    "method",
    [
        "dense",
        "xattention:tau=0.5,min_tokens=0",
        "dpxa:tau=0.3,window=1,min_tokens=0",
        "dpxa:tau=0.3,window=1,min_tokens=410",
    ],
)
def test_prefills_questions_in_the_prompt_with_the_method(
    reader: Reader, asked: list[Question], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are compared with those of whole prompts, each prefilled from the start."""
    monkeypatch.setattr(batched, "READ_AGAIN", 40)
    document = ids(TOKENS, 1)
    with torch.inference_mode():
        reader.read(document, method, 128)
    answers = ask_in_prompt(reader, document, asked, method, 128)
    assert reader.length == TOKENS
    for question, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            tail_TC = reader.read([*document, *question.prompt], method, 512).tail_TC
            logits = [reader.stack.logits(tail_TC)[0], *map(reader.next_logits, [[t] for t in question.gold])]
        best = [int(logits_V.argmax()) for logits_V in logits[:-1]]
        assert (answer.exact, answer.first) == (best == list(question.gold), best[0])
        golds = zip(logits, question.gold, strict=False)
        logp = sum(float(logits_V.log_softmax(-1)[token]) for logits_V, token in golds)
        assert answer.logp == pytest.approx(logp, abs=1e-4)
    with torch.inference_mode():
        reader.read(document, "dense", 128)


def test_merged_attention_of_document_and_question_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 5, n, 16, generator=generator) for n in (6, 2, 2))
    k_GSD, v_GSD = (torch.randn(2, 40, 16, generator=generator) for _ in range(2))
    out = attend_appended(q, k, v, k_GSD, v_GSD)
    for i in range(3):
        keys = torch.cat([k_GSD, k[i].transpose(0, 1)], dim=1)
        values = torch.cat([v_GSD, v[i].transpose(0, 1)], dim=1)
        seen = torch.ones(5, 45, dtype=torch.bool).tril(40)
        expected = scaled_dot_product_attention(
            q[i].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
        )
        torch.testing.assert_close(out[i], expected[0].transpose(0, 1))


def test_any_of_several_right_answers_is_exact() -> None:
    questions = [Question(about, (1,), (2,)) for about in ("a", "b", "a")]
    answers = [Answered(math.log(p), p > 0.5, 0, 0.0) for p in (0.25, 0.125, 0.625)]
    found = by_subject(questions, answers)
    assert found["a"] == (pytest.approx(math.log(0.875)), True)
    assert found["b"] == (pytest.approx(math.log(0.125)), False)


@pytest.fixture(scope="module")
def decoder(reader: Reader, asked: list[Question]) -> AnswerDecoder:
    return AnswerDecoder(reader, asked)


@pytest.mark.parametrize("given", ["1,3:999:8", "quest:999", None])
def test_selecting_every_page_equals_full_decode(
    reader: Reader, decoder: AnswerDecoder, asked: list[Question], given: str | None
) -> None:
    decoded = decoder.decode(parse_selection(given, 5) if given else None)
    assert decoded.share == pytest.approx(1.0) and decoded.milliseconds > 0
    assert all(decoded.agrees) and decoded.kl == pytest.approx(0.0, abs=1e-5)
    for answer, full in zip(decoded.answers, ask(reader, asked), strict=True):
        assert answer.exact == full.exact
        assert answer.logp == pytest.approx(full.logp, abs=1e-4)


def test_decodes_with_int8_kv_close_to_16_bits(reader: Reader, asked: list[Question]) -> None:
    """Full decode over int8 pages gives nearly the log-probabilities of a reader that rounds every row. They
    differ slightly from those with 16 bits."""
    narrow = Reader(reader.stack, TOKENS + 64, kv_dtype="int8")
    with torch.inference_mode():
        narrow.read(ids(TOKENS, 1), "dense", 128)
    wide = AnswerDecoder(reader, asked)
    decoded = AnswerDecoder(narrow, asked, wide).decode(None)
    assert 1e-6 < decoded.kl < 0.2 and decoded.share == pytest.approx(1.0)
    assert wide.decode(None).kl == pytest.approx(0.0, abs=1e-7)
    for answer, full, plain in zip(decoded.answers, ask(narrow, asked), ask(reader, asked), strict=True):
        assert answer.logp == pytest.approx(full.logp, abs=0.02)
        assert answer.logp != pytest.approx(plain.logp, abs=1e-4)


def test_refuses_to_decode_answers_of_one_token(reader: Reader) -> None:
    with pytest.raises(ValueError, match="every right answer is one token"):
        AnswerDecoder(reader, [Question("a", (1, 2), (3,))])


def test_a_smaller_page_budget_reads_a_smaller_share_of_pages(
    reader: Reader, decoder: AnswerDecoder, asked: list[Question]
) -> None:
    few = decoder.decode(parse_selection("1,3:4:2", 5))
    # Layers 0, 1 and 3 read all of 26 to 28 pages. Layers 2 and 4 read four pages.
    assert few.share == pytest.approx((3 + 2 * 4 / 27) / 5, abs=0.01)
    full = ask(reader, asked)
    assert any(
        one.logp != pytest.approx(other.logp, abs=1e-3) for one, other in zip(few.answers, full, strict=True)
    )
    assert few.kl > 1e-3


def test_quest_selects_the_pages_with_the_largest_bounds(
    reader: Reader, decoder: AnswerDecoder, asked: list[Question]
) -> None:
    """The pages are computed by the paper's definition, one head after the other."""
    generator = torch.Generator().manual_seed(5)
    q_HD, k_SHD, v_SHD = (torch.randn(*n, 8, generator=generator) for n in ((3,), (75, 3), (75, 3)))
    table_RP = torch.tensor([[6, 2, 5, 0, 3, 1]])
    pages_PSHD = torch.full((2, 7, 16, 3, 8), torch.nan)
    for pages, x_SHD in zip(pages_PSHD, (k_SHD, v_SHD), strict=True):
        for first in range(0, 75, 16):
            pages[table_RP[0, first // 16], : 75 - first] = x_SHD[first : first + 16]
    rows = BatchRows(table_RP.int(), torch.tensor([75]), None)
    (found_HD,) = QuestAttention(QuestPlan(5, 2), rows, 0.3).attend(2, q_HD[None], *pages_PSHD)
    for h in range(3):
        pages = [range(first, min(first + 16, 75)) for first in range(0, 75, 16)]
        bounds = [
            sum(max(float(q_HD[h, d] * k_SHD[s, h, d]) for s in page) for d in range(8)) for page in pages
        ]
        best = max(range(4), key=bounds.__getitem__)
        read = [*pages[best], *pages[4]]
        weights = (k_SHD[read, h] @ q_HD[h] * 0.3).softmax(0)
        torch.testing.assert_close(found_HD[h], weights @ v_SHD[read, h])
        assert all(bounds[n] >= float(k_SHD[s, h] @ q_HD[h]) for n in range(5) for s in pages[n])
    few = decoder.decode(parse_selection("quest:4", 5))
    assert few.share == pytest.approx((2 + 3 * 4 / 27) / 5, abs=0.01) and few.kl > 1e-3


@pytest.mark.parametrize("given", ["8,14", "1:16:8:2", "1,3:4:9", "7:16", "quest:0", "quest:1:2"])
def test_refuses_malformed_page_selections(given: str) -> None:
    with pytest.raises(ValueError):
        parse_selection(given, 5)


def test_gpu_yaml_serves_the_measured_method_and_page_selection() -> None:
    """The defaults of gpu.yaml and of the shipped profile equal the measured case."""
    config, layers = load(ROOT / "deploy" / "config" / "gpu.yaml"), 30
    rows = json.loads((RESULTS / "accuracy_h200.json").read_text())["rows"]
    measured = {row["case"]: row["method"] for row in rows}
    method, _, blocks = measured["dpxa_default"].partition(" recompute ")
    raw_rows = f"{method},cos=0.75,centred=0"  # measured before `centred` was an option
    assert config.prefill.method(config.door.default_method) == parse_method(raw_rows)
    assert config.decode.recompute_blocks == int(blocks)
    selection = measured["delta_default"].removeprefix("decode ")
    assert plan_layers(config.decode, layers) == parse_selection(selection, layers)
    assert config.decode.page_selection == "delta"
    assert config.decode.page_budget == PROFILED, "page selection is timed with another budget"


def test_reader_returns_density_and_tail_rows_across_chunks(reader: Reader) -> None:
    document = ids(TOKENS, 1)
    with torch.inference_mode():
        whole = reader.read(document, "dense", 1024, tail=300)
        dense = reader.read(document, "dense", 256, tail=300)
        sparse = reader.read(document, "streaming:min_tokens=0,window=128", 256, tail=300)
        reader.read(document, "dense", 128)
        torch.testing.assert_close(whole.tail_TC, dense.tail_TC, atol=1e-3, rtol=1e-3)
        kl_T = divergence(reader.stack, dense.tail_TC, sparse.tail_TC)
        assert dense.density == 1.0 and dense.milliseconds > 0
        assert sparse.density == pytest.approx((1 + 2 + 3 + 3) / (1 + 2 + 3 + 4))
        dense_TV = reader.stack.logits(dense.tail_TC).double().log_softmax(-1)
        sparse_TV = reader.stack.logits(sparse.tail_TC).double().log_softmax(-1)
        expected_T = (dense_TV.exp() * (dense_TV - sparse_TV)).sum(-1)
        torch.testing.assert_close(kl_T, expected_T, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(
            divergence(reader.stack, dense.tail_TC, dense.tail_TC), torch.zeros(300).double()
        )
        expected_A = dense_TV[:-1].gather(1, torch.tensor(document[-299:])[:, None])[:, 0]
        logp_A = tail_logps(reader.stack, dense.tail_TC, document[-300:])
        torch.testing.assert_close(logp_A, expected_A, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("length", "tail", "context"), [(500, 200, 64), (300, 300, 100), (450, 128, 64)])
def test_short_context_logits_equal_token_by_token_prefill(
    reader: Reader, length: int, tail: int, context: int
) -> None:
    """A token is expected to be predicted from only the `context` to 2 · `context` tokens before it."""
    document, expected = ids(length, 3), []
    with torch.inference_mode():
        for at in range(length - tail + 1, length):
            part = (at - (length - tail)) // context * context + length - tail
            begin = max(0, max(part - 1, length - tail) - context)
            assert context <= at - begin < 2 * context + 2 or begin == 0
            hidden_TC = reader.read(document[begin:at], "dense", 1024).tail_TC
            expected.append(float(reader.stack.logits(hidden_TC)[0].double().log_softmax(-1)[document[at]]))
        short_A = short_logps(reader, document, tail, context, 1024)
    torch.testing.assert_close(short_A, torch.tensor(expected).double(), atol=1e-4, rtol=1e-4)


def test_key_tokens_become_likely_only_with_distant_context() -> None:
    long_A = torch.tensor([-0.5, -0.5, LIKELY - 0.1, -1.9])
    short_A = torch.tensor([-0.5 - GAIN - 0.1, -0.5 - GAIN + 0.1, -9.0, -9.0])
    assert key_tokens(long_A, short_A).tolist() == [True, False, False, True]


def test_density_option_uses_the_profiles_thresholds(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    stack = whole_stack(directory)
    profiled = Reader(stack, 1024, make_profile(directory))
    method = "xattention:density={},window=1,min_tokens=0"
    with torch.inference_mode():
        some, more, dense = (
            profiled.read(ids(1000, 2), one, 256).density
            for one in (method.format(0.2), method.format(0.5), "dense")
        )
    assert some < more < dense == 1.0
    with pytest.raises(MethodError, match=r"density = 0.6: the model's profile has"):
        profiled.read(ids(600, 2), method.format(0.6), 256)
    with pytest.raises(MethodError, match="the model has no profile"):
        Reader(stack, 1024).read(ids(600, 2), method.format(0.2), 256)
