"""Tests questions over recomputed blocks, and merging the results of several processes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.accuracy import questions as batched
from deltafront.benchmarks.accuracy.__main__ import _recomputed
from deltafront.benchmarks.accuracy.merge import append_outcomes, conclude, merged, read_outcomes, write_shard
from deltafront.benchmarks.accuracy.questions import (
    Answered,
    Looked,
    ask,
    ask_and_look,
    ask_recomputed,
)
from deltafront.benchmarks.accuracy.report import Outcome, parse_gate, rows
from deltafront.kernels.constants import BLOCK
from deltafront.workers.calibration.probes import Question
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.model.decoder.recompute import QUESTION_ROWS, BlockAttention

from ..workers.tiny_model import make_tiny_model, whole_stack

BLOCKS = 6
SPARSE = "streaming:min_tokens=0,window=128"
ORIGIN = {"hardware": "none", "commit": "none", "dtype": "float32"}


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(199, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENT = ids(BLOCKS * BLOCK, 1)
QUESTIONS = [
    Question(f"q{i}", tuple(ids(5 + 3 * i, 10 + i)), tuple(ids(1 + 4 * i % 7, 30 + i))) for i in range(5)
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return Reader(whole_stack(directory), len(DOCUMENT) + 2 * BLOCK)


def read(reader: Reader, method: str, tokens: int = len(DOCUMENT)) -> None:
    with torch.inference_mode():
        reader.read(DOCUMENT[:tokens], method, 2 * BLOCK)


def kept(reader: Reader) -> torch.Tensor:
    return torch.stack([x.clone() for layer in reader.stack.layers for x in reader.document(layer)])


@pytest.mark.parametrize("blocks", [[], [3], [1, 3, 5]])
def test_restores_the_kv_cache_exactly_after_recomputation(reader: Reader, blocks: list[int]) -> None:
    """Recomputing blocks 1 and 2 changes nothing: sink and window already cover all tokens before them."""
    read(reader, SPARSE, len(DOCUMENT) - 7 if 5 not in blocks else len(DOCUMENT))
    before = kept(reader)
    with pytest.raises(ZeroDivisionError), torch.inference_mode(), reader.recomputed(blocks):
        changed = (kept(reader) != before).any(0).any(0).any(-1)
        assert {row // BLOCK for row in changed.nonzero().flatten().tolist()} == set(blocks) - {1}
        raise ZeroDivisionError
    assert torch.equal(kept(reader), before)


def test_recomputing_all_blocks_equals_dense_prefill(reader: Reader) -> None:
    read(reader, "dense")
    dense, dense_kv = ask(reader, QUESTIONS), kept(reader)
    read(reader, SPARSE)
    sparse = ask(reader, QUESTIONS)
    with torch.inference_mode(), reader.recomputed(range(BLOCKS)):
        torch.testing.assert_close(kept(reader), dense_kv, atol=2e-4, rtol=1e-4)
        again = ask(reader, QUESTIONS)
    assert logps(again) == pytest.approx(logps(dense), abs=1e-3)
    assert logps(sparse) != pytest.approx(logps(dense), abs=1e-2)


def test_recomputed_block_attends_densely_to_all_earlier_tokens(reader: Reader) -> None:
    """The expected block comes from dense prefill that begins at the block."""
    read(reader, SPARSE)
    with torch.inference_mode():
        with reader.recomputed([4]):
            got = kept(reader)
        reader.read(DOCUMENT[: 5 * BLOCK], "dense", BLOCK, after=4 * BLOCK)
        expected = kept(reader)
    torch.testing.assert_close(got[:, :, : 5 * BLOCK], expected, atol=2e-4, rtol=1e-4)


def test_asks_each_question_over_its_own_recomputed_blocks(reader: Reader) -> None:
    read(reader, SPARSE)
    before = kept(reader)
    answers, looked = ask_and_look(reader, QUESTIONS)
    assert logps(answers) == pytest.approx(logps(ask(reader, QUESTIONS)))
    found = ask_recomputed(reader, QUESTIONS, looked, 2)
    assert torch.equal(kept(reader), before)
    tiles = []
    for question, one, answer in zip(QUESTIONS, looked, found.answers, strict=True):
        blocks = one.looks.most_attended(2)
        tiles.append(sum(block + 1 for block in blocks))
        with torch.inference_mode(), reader.recomputed(blocks):
            assert ask(reader, [question]) == [answer]
    assert logps(found.answers) != pytest.approx(logps(answers), abs=1e-4)
    assert found.tiles == sum(tiles) / len(tiles)
    assert found.milliseconds > min(one.milliseconds for one in looked) > 0


@pytest.mark.parametrize("rows", [60, 1])
def test_chosen_blocks_do_not_depend_on_other_questions_in_the_batch(
    reader: Reader, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(reader, SPARSE, len(DOCUMENT) - 7)
    together = ask_and_look(reader, QUESTIONS)[1]
    monkeypatch.setattr(batched, "ROWS", rows)
    apart = ask_and_look(reader, [*reversed(QUESTIONS)])[1]
    for count in (1, 2, 3):
        chosen = [one.looks.most_attended(count) for one in together]
        assert chosen == [one.looks.most_attended(count) for one in reversed(apart)]
    assert len({tuple(one.looks.most_attended(1)) for one in together}) > 1


def test_answer_tokens_do_not_influence_which_blocks_are_recomputed(reader: Reader) -> None:
    """Another right answer does not change the blocks: the prompt's last rows choose them."""
    read(reader, SPARSE)
    prompt, looks = tuple(ids(QUESTION_ROWS + 3, 5)), BlockAttention(reader.length)
    seen: dict[int, torch.Tensor] = {}

    def look(layer: int, index: int, q_LHD: torch.Tensor) -> None:
        assert (index, len(q_LHD)) == (0, len(prompt))
        seen[layer] = q_LHD
        looks.add(q_LHD, reader.document(layer)[0])

    ask(reader, [Question("a", prompt, (1, 2, 3))], look=look)
    assert list(seen) == list(reader.stack.layers)
    other = ask_and_look(reader, [Question("a", prompt, tuple(ids(20, 6)))])[1][0]
    for count in range(1, 5):
        assert looks.most_attended(count) == other.looks.most_attended(count)


def test_recomputation_adds_to_the_methods_density_and_time(reader: Reader) -> None:
    read(reader, SPARSE, len(DOCUMENT) - 7)
    answers, looked = ask_and_look(reader, QUESTIONS)
    own = Outcome("streaming", "needles", 761, "a-0", 0.25, {}, ms=10.0, kl=0.5, kl_p95=1.0, perplexity=8.0)
    every = [Looked(one.looks, 1000.0) for one in looked]
    got = _recomputed(reader, QUESTIONS, every, 9, own)
    # Blocks 1 to 4 are recomputed: not the first, and not the last, partial one.
    assert got.density == pytest.approx(0.25 + (2 + 3 + 4 + 5) / 21)
    assert got.ms is not None and got.recompute_ms is not None and got.recompute_ms > 1000.0
    assert got.ms == pytest.approx(10.0 + got.recompute_ms)
    assert (got.case, got.kl, got.kl_p95, got.perplexity) == ("streaming recompute 9", 0.5, 1.0, 8.0)
    assert list(got.answers) == [question.about for question in QUESTIONS] and len(answers) == 5


def outcomes() -> list[Outcome]:
    """Make the outcomes of one process: 5 documents of one length, 2 of another."""
    rng, found = random.Random(4), list[Outcome]()
    for count, tokens in ((5, 4096), (2, 1024)):
        for task in ("needles", "prose"):
            for index in range(count):
                for case in ("dense", "dpxa", "dpxa recompute 8"):
                    keys = range(3 if task == "needles" else 0)
                    answers = {f"key {i}": (-rng.random(), rng.random() < 0.6) for i in keys}
                    name, ms = f"{'ab'[index % 2]}-{index}", rng.random()
                    found.append(Outcome(case, task, tokens, name, rng.random(), answers, ms=ms, kl=ms / 3))
    return found


def test_merged_shards_equal_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = outcomes()
    paths = [tmp_path / "shards" / f"{shard}.json" for shard in range(3)]
    for shard, path in enumerate(paths):
        mine = [one for one in every if int(one.document[2:]) % 3 == shard]
        write_shard(mine, (shard, 3), ORIGIN, path)
    found, origin = merged(paths[::-1])
    assert rows(found, "dense") == rows(every, "dense")
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    gates = [parse_gate("dpxa recompute 8:exact>=0,ms<=1"), parse_gate("dpxa:ms<=0")]
    assert conclude(every, ORIGIN, gates, alone) == 1
    said = capsys.readouterr()
    assert conclude(found, origin, gates, together) == 1
    assert capsys.readouterr() == said and "dpxa recompute 8" in said.out
    assert said.err.count("gate missed: dpxa, ") == 4 and "recompute" not in said.err
    assert together.read_text() == alone.read_text()


def test_appends_outcomes_document_by_document(tmp_path: Path) -> None:
    every, path = outcomes(), tmp_path / "outcomes.jsonl"
    append_outcomes(path, every[:6])
    append_outcomes(path, every[6:])
    assert read_outcomes(path) == every


def test_refuses_incomplete_or_different_shards(tmp_path: Path) -> None:
    paths = [tmp_path / f"{shard}.json" for shard in range(2)]
    for shard, path in enumerate(paths):
        write_shard([], (shard, 2), {**ORIGIN, "commit": str(shard)}, path)
    for some in (paths[:1], [paths[0], paths[0]]):
        with pytest.raises(ValueError, match="not each shard once"):
            merged(some)
    with pytest.raises(ValueError, match="different runs"):
        merged(paths)
    assert json.loads(paths[1].read_text())["shard"] == [1, 2]


def logps(answers: list[Answered]) -> list[float]:
    return [answer.logp for answer in answers]
