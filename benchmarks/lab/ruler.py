"""Makes prompts with RULER's generator of lm-evaluation-harness, as JSONL for `lab --prompts` and `evaluate`.

    python -m venv ruler && ruler/bin/pip install 'lm_eval[ruler]' transformers
    ruler/bin/python benchmarks/lab/ruler.py --tokenizer MODEL/tokenizer.json --text FILE \
        --tokens 31000 --samples 20 --out prompts.jsonl

It needs a virtual environment of its own, and nothing of Deltafront. The harness hides facts in essays that
it downloads; here --text takes their place, cut into sentences by punctuation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

NIAH: Mapping[str, Mapping[str, Any]] = {
    "single_1": {"type_haystack": "repeat"},
    "single_2": {},
    "single_3": {"type_needle_v": "uuids"},
    "multikey_1": {"num_needle_k": 4},
    "multikey_2": {"type_haystack": "needle"},
    "multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "multivalue": {"num_needle_v": 4},
    "multiquery": {"num_needle_q": 4},
}
PLAIN = {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "numbers"}


class Tokenizer:
    """Gives a `tokenizers.Tokenizer` the interface of transformers' tokenizers, which the harness calls."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(path))

    def __call__(self, text: str) -> Any:
        return argparse.Namespace(input_ids=self._fast.encode(text).ids)


def niah(task: str, text: str, tokenizer: Tokenizer, tokens: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    prepare_niah.cached_sent_tokenize = lambda words: re.split(r"(?<=[.!?]) ", words)
    how = {**PLAIN, **NIAH[task]}
    words = text.split() * (2 + 2 * tokens // max(1, len(text.split())))
    hay = words if how["type_haystack"] == "essay" else prepare_niah.get_haystack(how["type_haystack"])
    made: list[dict[str, Any]] = prepare_niah.generate_samples(
        hay,
        TOKENIZER=tokenizer,
        max_seq_length=tokens,
        template=niah_utils.TEMPLATE,
        num_samples=samples,
        **how,
    )
    return made


def variables(tokenizer: Tokenizer, tokens: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as make

    (example,) = make(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)
    made: list[dict[str, Any]] = make(
        tokenizer=tokenizer, num_samples=samples, max_seq_length=tokens, icl_example=example
    )
    return made


def common_words(tokenizer: Tokenizer, tokens: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.cwe_utils import sys_word_pair_random as make

    made: list[dict[str, Any]] = make(num_samples=samples, max_seq_length=tokens, tokenizer=tokenizer)
    return made


def frequent_words(tokenizer: Tokenizer, tokens: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext as make

    made: list[dict[str, Any]] = make(tokenizer, max_seq_length=tokens, num_samples=samples)
    return made


OTHERS: Mapping[str, Callable[[Tokenizer, int, int], list[dict[str, Any]]]] = {
    "variables": variables,
    "common_words": common_words,
    "frequent_words": frequent_words,
}


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each sample as a line: its prompt ends in the beginning of the answer, as in the harness."""
    import numpy

    text, tokenizer = arguments.text.read_text(encoding="utf-8"), Tokenizer(arguments.tokenizer)
    for task in arguments.tasks:
        random.seed(f"{arguments.seed} {task}")
        numpy.random.seed(arguments.seed)
        if task in NIAH:
            made = niah(task, text, tokenizer, arguments.tokens, arguments.samples)
        else:
            made = OTHERS[task](tokenizer, arguments.tokens, arguments.samples)
        for number, one in enumerate(made):
            prompt = f"{one['input']} {one['gen_prefix']}"
            yield {"id": f"{task}-{number}", "task": task, "prompt": prompt, "answers": one["outputs"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, tasks = parser.add_argument, [*NIAH, *OTHERS]
    add("--tokenizer", type=Path, required=True, help="tokenizer.json of the model")
    add("--text", type=Path, required=True, help="what facts are hidden in")
    add("--tokens", type=int, default=31_000, help="the longest prompt, 128 tokens of answer included")
    add("--samples", type=int, default=20, help="of each task")
    add("--tasks", nargs="+", choices=tasks, default=[*NIAH, "variables"], metavar="TASK")
    add("--seed", type=int, default=11)
    add("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with arguments.out.open("w", encoding="utf-8") as file:
        for line in lines(arguments):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
