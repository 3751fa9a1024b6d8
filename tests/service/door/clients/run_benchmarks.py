"""guidellm and aiperf, which measure a service: every request of theirs is answered."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import BASE, MODEL, case, main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TORCH = sys.argv[3]
"""A folder of packages with a torch for CPUs: guidellm's requirements would bring CUDA's."""
WITH_TORCH = f"import sys; sys.path.append({TORCH!r}); from guidellm.__main__ import cli; cli()"
REQUESTS, PROMPT, ANSWER = 4, 50, 8
TIMEOUT_S = 300


def run(home: str, *command: str) -> None:
    ran = subprocess.run(
        command, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert not ran.returncode, ran.stdout[-3000:] + ran.stderr[-3000:]


def tokenizer(home: str) -> str:
    """Write a tokenizer with a token for each byte, and return its folder."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(home)
    return home


@case
def guidellm() -> None:
    with tempfile.TemporaryDirectory() as home:
        run(
            home, sys.executable, "-c", WITH_TORCH, "run",
            "--backend", f"kind=openai_http,target={BASE},model={MODEL}", "--profile", "kind=synchronous",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer(home)}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        )  # fmt: skip
        (found,) = json.loads((Path(home) / "benchmarks.json").read_text())["benchmarks"]
    done = found["requests"]["successful"]
    assert [one["output_tokens"] for one in done] == [ANSWER] * REQUESTS, found["metrics"]["request_totals"]


@case
def aiperf() -> None:
    program = str(Path(sys.executable).with_name("aiperf"))
    with tempfile.TemporaryDirectory() as home:
        run(
            home, program, "profile", "--model", MODEL, "--url", BASE, "--endpoint-type", "chat",
            "--streaming",
            "--tokenizer", tokenizer(home), "--request-count", str(REQUESTS), "--concurrency", "2",
            "--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER),
            "--use-server-token-count", "--per-chunk-usage", "--ui-type", "none",
        )  # fmt: skip
        (path,) = Path(home).rglob("profile_export_aiperf.json")
        found = json.loads(path.read_text())
    assert (found["request_count"]["avg"], found["error_summary"]) == (REQUESTS, []), found
    assert found["output_sequence_length"]["avg"] == ANSWER, found["output_sequence_length"]


main()
