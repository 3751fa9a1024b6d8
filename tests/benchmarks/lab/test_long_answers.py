"""Tests `benchmarks.lab.long_answers` on a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.lab.long_answers import CONTEXT, Batch, fresh, main, row
from deltafront.tests.service.inprocess import VOCABULARY, write_tokenizer
from deltafront.tests.workers.tiny_model import make_tiny_model, whole_stack
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.settings import DecodeConfig

PAGED = "dense/delta_layers=2,page_budget=10"


def test_tokens_after_repeated_context_are_not_fresh() -> None:
    once = list(range(40))
    assert all(fresh(once))
    assert fresh([*once, *once]) == [True] * (40 + CONTEXT) + [False] * (40 - CONTEXT)


def test_log_probabilities_are_those_of_dense_decode(tmp_path: Path) -> None:
    stack = whole_stack(make_tiny_model(tmp_path / "model"))
    samples = [
        Sample(TaskPrompt("any", str(n), "", "?"), tuple((7 * at + n) % 60 for at in range(length)))
        for n, length in enumerate((300, 211))
    ]
    plan = plan_layers(DecodeConfig(full_layers=()), stack.config.layers)
    with torch.inference_mode():
        decoded = Batch(stack, samples, 6, 128).decode(plan)
        for place, sample in enumerate(samples):
            reader = Reader(stack, 320)
            hidden_1C = reader.read(sample.ids, "dense", 128).tail_TC
            for token, logp in zip(decoded.ids_BT[place], decoded.logp_BT[place], strict=True):
                own_V = stack.logits(hidden_1C)[0].log_softmax(-1)
                assert float(own_V[token]) == pytest.approx(float(logp), abs=1e-4)
                hidden_1C = reader.append([int(token)])
        again = Batch(stack, samples, 6, 128).decode(plan, decoded.ids_BT)
    assert torch.equal(again.ids_BT, decoded.ids_BT) and bool(decoded.best_BT.all())
    same = row("dense", again, decoded)
    assert same["agreement"] == 1 and same["logp"] == pytest.approx(0, abs=1e-6)


def test_settings_follow_the_answers_that_an_earlier_run_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "tiny", VOCABULARY, positions=1024)
    write_tokenizer(model)
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "long.json"
    prompts.write_text("".join(f'{{"prompt": "{n} {"It is a text. " * 40}"}}\n' for n in range(3)))
    given = f"--model {model} --prompts {prompts} --result {result} --dtype float32 --device cpu --commit c"
    given += " --answer-tokens 5 --chunk 256"
    assert main([*given.split(), "--settings"]) == 0
    told = result.with_suffix(".told.json")
    written = told.read_text()
    assert main([*given.split(), "--together", "2", "--settings", "dense", PAGED]) == 0
    assert told.read_text() == written and len(json.loads(written)["ids"]) == 3
    dense, paged = json.loads(result.read_text())["rows"]
    assert dense["agreement"] == 1 == dense["pages_read"] and dense["tokens"] == 15
    assert paged["agreement"] < 1 and paged["pages_read"] < 1 and paged["logp"] < -0.01
    del capsys
