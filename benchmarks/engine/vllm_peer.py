"""Measures vLLM's TTFT and time per token with the shape, prompts and GPUs of our benchmark.

    python -m deltafront.benchmarks.engine.vllm_peer --ranks 2 --model DIRECTORY

vLLM runs in this process, with random weights and its defaults (FlashAttention, CUDA graphs and chunked
prefill), except for the maximum prompt length. The time per token is the difference between a long and a
short answer to prompts in vLLM's prefix cache, divided by the difference in tokens. The script needs vLLM,
which this project does not install.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.engine.__main__ import ROOT
from deltafront.benchmarks.engine.measure import random_ids
from deltafront.benchmarks.engine.model import SHAPES
from deltafront.benchmarks.engine.rows import BATCH, merge_into, row
from deltafront.benchmarks.engine.setup import ANSWER_ROOM
from deltafront.benchmarks.harness import commit_of

SHORT, LONG = 16, 144
"""Tokens of the short and of the long answer."""


def parsed() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a directory with its config.json")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, choices=(1, BATCH), default=BATCH, help="that decode at once")
    parser.add_argument("--kv-dtype", default="auto", help="kv_cache_dtype")
    parser.add_argument("--quantisation", help="as vLLM names it")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--commit")
    return parser.parse_args()


class Peer:
    def __init__(self, given: argparse.Namespace) -> None:
        import vllm

        self._given, self._vllm = given, vllm
        self._model = vllm.LLM(
            model=str(given.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=given.quantisation,
            kv_cache_dtype=given.kv_dtype,
            max_model_len=given.tokens + ANSWER_ROOM,
            tensor_parallel_size=given.ranks,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.92,
        )

    def seconds(self, prompts: Sequence[Sequence[int]], answer: int) -> float:
        how = self._vllm.SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0, detokenize=False)
        began = time.perf_counter()
        self._model.generate([{"prompt_token_ids": list(ids)} for ids in prompts], how, use_tqdm=False)
        return time.perf_counter() - began

    def first_token_s(self) -> float:
        vocabulary, tokens = SHAPES[self._given.shape].vocab, self._given.tokens
        self.seconds([random_ids(tokens, vocabulary, 1)], 1)  # warm up
        return statistics.median(
            self.seconds([random_ids(tokens, vocabulary, 2 + n)], 1) for n in range(self._given.repeats)
        )

    def token_ms(self, batch: int) -> float:
        vocabulary, tokens = SHAPES[self._given.shape].vocab, self._given.tokens
        prompts = [random_ids(tokens, vocabulary, 100 + n) for n in range(batch)]
        self.seconds(prompts, 1)
        times = [
            self.seconds(prompts, LONG) - self.seconds(prompts, SHORT) for _ in range(self._given.repeats)
        ]
        return 1e3 * statistics.median(times) / (LONG - SHORT)


def main() -> None:
    given = parsed()
    began = time.perf_counter()
    peer = Peer(given)
    start, tokens = time.perf_counter() - began, given.tokens
    about: dict[str, Any] = {"version": peer._vllm.__version__, "decode_gpu": "last"}
    about |= {"ranks": given.ranks} if given.ranks > 1 else {}
    about |= {"shape": given.shape} if given.shape != "8b" else {}
    about |= {"kv_dtype": given.kv_dtype} if given.kv_dtype != "auto" else {}
    mark = f"_{given.quantisation}" if given.quantisation else ""
    gpu, commit = torch.cuda.get_device_name(), given.commit or commit_of(ROOT)

    def found(case: str, value: float, unit: str, **more: int) -> None:
        measured = {**row(case + mark, value, unit, gpus=given.ranks, **more), **about}
        print(measured, flush=True)
        merge_into(given.result, [measured], gpu, commit)

    found("vllm_ready", round(start, 1), "s")
    found("vllm_ttft_dense", round(peer.first_token_s(), 4), "s", tokens=tokens)
    for batch in (1, given.sessions) if given.sessions > 1 else (1,):
        name = "vllm_token_full" if batch == 1 else f"vllm_batch{batch}_token_full"
        found(name, round(peer.token_ms(batch), 3), "ms", tokens=tokens)


if __name__ == "__main__":
    main()
