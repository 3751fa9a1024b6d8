"""Runs three tasks of lm-eval on a service and on transformers, in lm-eval's own environment, and prints
every log-likelihood and score of both as a line of JSON.

The tasks need no hub: their samples are paragraphs of a text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from reference import merged_model

BASE, MODEL, DIRECTORY, TEXT = sys.argv[1:]
MARK = "scores: "
"""The prefix of the line, because lm-eval prints, too."""
SAMPLES, CHOICES = 6, 3
LENGTHS = range(120, 300)
"""Characters of a paragraph."""
TASKS: dict[str, dict[str, Any]] = {
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{said}}",
        "doc_to_target": " {{word}}",
        "metric_list": [{"metric": "acc"}],
    },
    "ending": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "paragraph": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


def paragraphs() -> list[str]:
    lines = (line.strip() for line in Path(TEXT).read_text().splitlines())
    return [line for line in lines if len(line) in LENGTHS][: SAMPLES + CHOICES]


def samples() -> DatasetDict:
    """Make the samples of all tasks. `said` repeats an ending up to its last word, `word`, so that a
    model can guess it."""
    texts = paragraphs()
    halves = [text[: len(text) // 2].rsplit(" ", 1)[0] for text in texts]
    ends = [text.removeprefix(half).strip() for text, half in zip(texts, halves, strict=True)]
    made = [
        {
            "text": texts[number],
            "start": halves[number],
            "endings": ends[number : number + CHOICES],
            "said": f"{ends[number]} {ends[number].rpartition(' ')[0]}",
            "word": ends[number].rpartition(" ")[2],
        }
        for number in range(SAMPLES)
    ]
    return DatasetDict(test=Dataset.from_list(made))


def scores(model: Any) -> dict[str, Any]:
    """Return each task's scores, and the log-likelihoods of its samples."""
    tasks = [{"task": name, **COMMON, **task} for name, task in TASKS.items()]
    found: Any = simple_evaluate(model, tasks=tasks, bootstrap_iters=0)
    return {
        name: {
            "scores": {
                metric: value
                for metric, value in found["results"][name].items()
                if isinstance(value, float) and "stderr" not in metric
            },
            "samples": [sample["resps"] for sample in found["samples"][name]],
        }
        for name in TASKS
    }


COMMON = {"custom_dataset": lambda **_: samples(), "test_split": "test", "num_fewshot": 0}
served = LocalCompletionsAPI(
    base_url=f"{BASE}/v1/completions", model=MODEL, tokenizer=DIRECTORY, tokenizer_backend="huggingface",
    batch_size=4, timeout=600,
)  # fmt: skip
own = HFLM(pretrained=merged_model(Path(DIRECTORY)), tokenizer=DIRECTORY, backend="causal")
print(MARK + json.dumps({"served": scores(served), "transformers": scores(own)}))
