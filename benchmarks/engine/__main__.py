"""Times the service with a model of a given shape and random weights: TTFT, time per decoded token, start-up.

    python -m deltafront.benchmarks.engine --stages 1 2 --cases ttft peers products decode ready

With random weights attention is nearly uniform, so a threshold would keep most tiles. `dpxa` therefore keeps
a fixed share of each row's tiles, with the usual scores and ranking. Every start-up is a row: `ready_cold` if
the kernel cache was empty, else `ready_warm`. `--decode-gpu last` decodes on a stage's GPU; `mapped` also
does, and shares one copy of weights and KV cache with the stage; `own` decodes on a further GPU, `none` on
the CPU (for TTFT only). `gpus` in rows counts the GPUs of prefill.

Cases:
- ready: one more start-up.
- ttft: TTFT of prompts of --tokens.
- peers: TTFT with SDPA's FlashAttention-2 and cuDNN in place of our attention.
- products: the GEMMs of linear layers alone.
- decode: time per token of one and of four sessions, with full attention and with DELTA.
- throughput: --prompts of --prompt-tokens, sent together. prefill.cache_tokens and decode.cache_tokens must
  have room for one more prompt.
- questions: TTFT of a question to a session of --decode-tokens, with --recompute blocks recomputed.
- asked: TTFT of a prompt of --tokens that ends in its question, with --recompute blocks recomputed.
- cached: TTFT of cached prompts, in a separate service: with another question, with a new last quarter, and
  in a conversation of 43 turns that grows to --turn-tokens.
- tiers: TTFT of prompts in --host-gib of host memory and on disk, while the decode worker has room for one
  (`tiers.py`).

--files 16 fp8 runs every case with 16-bit and with compressed-tensors FP8 files. Names of FP8 cases end with
    _files. With --quantisation fp8 both have FP8 weights on the GPU.
--kv-dtypes 16 int8 runs every case with each dtype of the KV cache, in this order. Rows with int8 have the
    field `kv_dtype`.

Each row is printed and merged into --result at once, so several runs on several machines can fill one file.
On a CPU:

    … --shape tiny --cases ttft products decode --tokens 4096 --densities 0.5 --decode-tokens 512 --chunk 1024
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import yaml

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.engine import cached, measure, peer_attention, rows, tiers
from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.products import products_s
from deltafront.benchmarks.engine.rows import BATCH, Row, merge_into, row
from deltafront.benchmarks.engine.setup import ANSWER_ROOM, Setup, dpxa_share
from deltafront.benchmarks.harness import commit_of
from deltafront.service.cli.size import RESERVE_GIB
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.local.server_process import LocalService
from deltafront.service.request.answers import GenerateFinished
from deltafront.workers.evaluation.setting import split_method
from deltafront.workers.settings import KVDtype, Quantisation

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "engine_h200.json"
BY_DEFAULT = ("ready", "ttft", "peers", "products", "decode")
CASES = (*BY_DEFAULT, "throughput", "questions", "asked", "cached", "tiers")
SERVED = {"ttft", "decode", "peers", "throughput", "questions", "asked"}
DENSITIES = {32_768: 0.1, 131_072: 0.055, 262_144: 0.036, 524_288: 0.022}
"""Densities of `dpxa` by prompt length in tokens. A prompt gets that of the nearest length, by ratio."""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=BY_DEFAULT)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 131_072, 262_144])
    parser.add_argument("--peer-tokens", type=int, nargs="+", help="of the peers; by default as --tokens")
    parser.add_argument("--densities", type=float, nargs="+", help="of dpxa, one for each of --tokens")
    parser.add_argument("--methods", nargs="+", choices=("dense", "dpxa"), default=["dense", "dpxa"])
    parser.add_argument("--peers", nargs="+", choices=("fa2", "cudnn"), default=["fa2", "cudnn"])
    parser.add_argument("--repeats", type=int, default=3, help="of a first token")
    parser.add_argument("--row-s", type=float, default=60, help="a row that took longer is not repeated")
    parser.add_argument("--prompts", type=int, default=16, help="of throughput")
    parser.add_argument("--prompt-tokens", type=int, default=131_072, help="of each")
    parser.add_argument("--decode-tokens", type=int, default=131_072, help="of each session")
    parser.add_argument("--sessions", type=int, choices=(1, BATCH), default=BATCH, help="that decode at once")
    parser.add_argument("--reserve-gib", type=float, default=RESERVE_GIB, help="of each process on a GPU")
    parser.add_argument("--host-gib", type=float, default=40.0, help="of host memory, of tiers")
    parser.add_argument("--turn-tokens", type=int, default=142_000, help="of the last turn of cached")
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--recompute", type=int, nargs="+", default=[0, 8, 16], help="blocks")
    parser.add_argument(
        "--settings", nargs="+", metavar="METHOD:OPTIONS", help="of asked; by default dpxa at --densities"
    )
    parser.add_argument("--questions", type=int, default=9, help="asked of each")
    parser.add_argument("--stages", type=int, nargs="+", default=[1], help="of a group: one service for each")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--decode-gpu", choices=("own", "last", "mapped", "none"), default="own")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the decode worker")
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument(
        "--quantisation", choices=get_args(Quantisation), help="sets model.quantisation and marks the cases"
    )
    parser.add_argument(
        "--kv-dtypes", nargs="+", choices=("16", *get_args(KVDtype)), default=["16"], help="decode.kv_dtype"
    )
    parser.add_argument("--files", nargs="+", choices=("16", "fp8"), default=["16"], help="of the weights")
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="configuration")
    parser.add_argument("--model", type=Path, help="where the model is made; memory-backed by default")
    parser.add_argument("--kernel-cache", type=Path, default=Path(tempfile.gettempdir()) / "engine-kernels")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    given = parser.parse_args(arguments)
    if given.densities and len(given.densities) != len(given.tokens):
        parser.error("--densities: one for each of --tokens")
    return given


class Run:
    """Runs the measurements of one command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given = arguments
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.gpu = torch.cuda.get_device_name() if self.on_gpu else "no GPU"
        self.commit = arguments.commit or commit_of(ROOT)
        together = [arguments.prompt_tokens] * ("throughput" in arguments.cases)
        self.longest = max(*arguments.tokens, *[arguments.turn_tokens] * ("cached" in arguments.cases), 1)
        longest = max(self.longest, *self.session_tokens, *together, 1)
        self.shape = replace(SHAPES[arguments.shape], positions=longest + ANSWER_ROOM)
        memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        self.model: Path = arguments.model or memory / f"deltafront-engine-{arguments.shape}"
        self.mark = f"_{arguments.quantisation}" if arguments.quantisation else ""

    @property
    def session_tokens(self) -> list[int]:
        count = self.given.sessions * ("decode" in self.given.cases) or int("questions" in self.given.cases)
        asked = [max(self.given.tokens)] * ("asked" in self.given.cases)  # room to recompute blocks
        return [self.given.decode_tokens] * count or asked

    def model_of(self, files: str) -> Path:
        return self.model if files == "16" else self.model.with_name(f"{self.model.name}-{files}-files")

    def setup(
        self,
        stages: int,
        kv_dtype: KVDtype | None,
        files: str = "16",
        *,
        remembers: bool = False,
        more: Mapping[str, Any] = {},
    ) -> Setup:
        given = self.given
        pairs = (one.partition("=") for one in given.set)
        more = {**more, **{name: yaml.safe_load(value) for name, _, value in pairs}}
        if given.quantisation:
            more["model.quantisation"] = given.quantisation
        if remembers:
            more["door.prefix_reuse"] = True
        return Setup(
            self.model_of(files),
            self.shape,
            self.longest,
            self.session_tokens,
            stages,
            given.groups,
            given.decode_gpu,
            given.chunk,
            "cuda" if self.on_gpu else "cpu",
            given.kernel_cache,
            more=more,
            ranks=given.ranks,
            kv_dtype=kv_dtype,
        )

    def keep(self, one: Row, setup: Setup | None) -> None:
        """Print and write a row at once, so that interrupted runs keep it. setup: None if no service ran."""
        made = {**one}
        if setup is not None:
            mark = self.mark if setup.model == self.model else f"{self.mark}_files"
            made = {**one, "case": f"{one['case']}{mark}", "decode_gpu": setup.decode_gpu}
            made["chunk"] = setup.chunk_tokens
            if self.given.shape != "8b":
                made["shape"] = self.given.shape
            if setup.ranks > 1:
                made["ranks"] = setup.ranks
            if setup.kv_dtype is not None:
                made["kv_dtype"] = setup.kv_dtype
        print(made, flush=True)
        merge_into(self.given.result, [made], self.gpu, self.commit)

    def options(self, method: str, tokens: int) -> dict[str, float]:
        if method != "dpxa":
            return {}
        given = self.given
        asked = dict(zip(given.tokens, given.densities or (), strict=False)) or DENSITIES
        nearest = min(asked, key=lambda length: abs(math.log(length / tokens)))
        return {"share": dpxa_share(asked[nearest], tokens), "min_tokens": 0}

    def prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        return [measure.random_ids(tokens, self.shape.vocab, 1000 * seed + n) for n in range(count)]

    @contextmanager
    def started(self, setup: Setup) -> Iterator[DeltafrontClient]:
        cache = self.given.kernel_cache
        cold = not cache.is_dir() or not any(cache.iterdir())
        environment = {
            "RAY_memory_monitor_refresh_ms": "0",  # some machines have more memory than Ray sees at first
            "PYTHONDONTWRITEBYTECODE": "",  # so that a warm start finds byte code, like installed packages
        }
        with tempfile.TemporaryDirectory() as folder:
            path = setup.write(Path(folder))
            service = LocalService(path, start_s=500, environment=environment)
            began = time.perf_counter()
            with service:
                ready = round(time.perf_counter() - began, 1)
                self.keep(row("ready_cold" if cold else "ready_warm", ready, "s", gpus=setup.gpus), setup)
                with DeltafrontClient(service.address) as client:
                    yield client

    # --- the cases ---------------------------------------------------------------------------------------

    def first_tokens(self, client: DeltafrontClient, setup: Setup, methods: dict[str, str]) -> None:
        """Measure TTFT with one prompt per prefill group, sent together. methods: name → case."""
        given = self.given
        for method, case in methods.items():
            lengths = given.peer_tokens if case.endswith("_stack") and given.peer_tokens else given.tokens
            for tokens in lengths:
                options = self.options(method, tokens)
                results: list[GenerateFinished] = []
                began = time.perf_counter()
                for seed in range(given.repeats):
                    prompts = self.prompts(setup.groups, tokens, seed)
                    results += measure.at_once(client, prompts, method, options)
                    if time.perf_counter() - began > given.row_s:
                        break
                name = case if setup.groups == 1 else f"{case}_{setup.groups}_groups"
                self.keep(measure.ttft_row(name, results, setup.gpus), setup)

    def throughput(self, client: DeltafrontClient, setup: Setup) -> None:
        tokens = self.given.prompt_tokens
        prompts = self.prompts(self.given.prompts, tokens, seed=7)
        for method in self.given.methods:
            options = self.options(method, tokens)
            rate = measure.prompts_per_s(client, prompts, method, options)
            one = rows.throughput_row(method, round(rate, 4), tokens, setup.gpus, setup.groups)
            self.keep(one, setup)

    def decoding(self, client: DeltafrontClient, setup: Setup) -> None:
        tokens = self.given.decode_tokens
        prompts = self.prompts(self.given.sessions, tokens, seed=99)
        with measure.sessions(client, prompts, "dpxa") as asked:
            for one in measure.token_rows(client, asked, self.given.answer, tokens, setup.gpus):
                self.keep(one, setup)

    def questions(self, client: DeltafrontClient, setup: Setup) -> None:
        given, tokens = self.given, self.given.decode_tokens
        with measure.sessions(client, self.prompts(1, tokens, seed=98), "dpxa") as (session,):
            for blocks in given.recompute:
                one = measure.question_row(client, session, blocks, given.questions, tokens, setup.gpus)
                self.keep(one, setup)

    def asked(self, client: DeltafrontClient, setup: Setup) -> None:
        """Measure TTFT of prompts that end in their question, by --settings and by blocks of --recompute."""
        given = self.given
        every = itertools.product(given.tokens, given.settings or ["dpxa"], given.recompute)
        for tokens, setting, blocks in every:
            documents = self.prompts(given.repeats, tokens - measure.APPENDED, seed=97)
            method, options = split_method(setting)
            options = options or self.options(method, tokens)
            results = [measure.first_token(client, ids, method, options, blocks) for ids in documents]
            one = measure.ttft_row(f"ttft_{setting}_recompute_{blocks}", results, setup.gpus)
            self.keep({**one, "tokens": tokens}, setup)

    def cached(self, setup: Setup) -> None:
        """Measure prefix cache hits. Only this case's service has a prefix cache."""
        given, gpus = self.given, setup.gpus

        def made(tokens: int, seed: int) -> list[int]:
            return measure.random_ids(tokens, self.shape.vocab, 5000 + seed)

        with self.started(setup) as client:
            for tokens in given.tokens:
                options = self.options("dpxa", tokens)
                for measured in (cached.question_again, cached.long_rest):
                    self.keep(measured(client, made, tokens, given.repeats, options, gpus), setup)
            options = self.options("dpxa", given.turn_tokens)
            self.keep(cached.turns(client, made, given.turn_tokens, options, gpus), setup)

    def tiers(self, stages: int, kv_dtype: KVDtype | None, files: str) -> None:
        """Measure the KV cache's host and disk tiers, in services that share a directory."""
        given, tokens = self.given, self.given.tokens[0]

        def made(tokens: int, seed: int) -> list[int]:
            return measure.random_ids(tokens, self.shape.vocab, 5000 + seed)

        with tempfile.TemporaryDirectory() as folder:
            mapped = given.decode_gpu == "mapped"
            more = tiers.settings(tokens, given.host_gib, Path(folder), mapped=mapped)
            setup = self.setup(stages, kv_dtype, files, remembers=True, more=more)
            options, store = self.options("dpxa", tokens), Path(folder)
            for one in tiers.measured(
                lambda: self.started(setup), made, tokens, given.repeats, options, setup.gpus, store
            ):
                self.keep(one, setup)

    def serve(self, setup: Setup) -> None:
        """Run the cases that share one service."""
        given = self.given
        with self.started(setup) as client:
            if "ttft" in given.cases:
                self.first_tokens(client, setup, {name: f"ttft_{name}" for name in given.methods})
            if "decode" in given.cases:
                self.decoding(client, setup)
            if "throughput" in given.cases:
                self.throughput(client, setup)
            if "questions" in given.cases:
                self.questions(client, setup)
            if "asked" in given.cases:
                self.asked(client, setup)
            if used := measure.gpu_memory_gib():
                fullest = round(max(used), 1)
                self.keep(row("memory", fullest, "GiB", tokens=setup.tokens, gpus=setup.gpus), setup)
            after = measure.compilations(client.info().metrics_address)
            if after is None:
                print("compilations: the service does not count them", flush=True)
            else:
                self.keep(row("compilations", after, "kernels", gpus=setup.gpus), setup)
            if "peers" in given.cases:  # last, because cuDNN first builds a plan for each length
                self.first_tokens(client, setup, {name: f"ttft_{name}_stack" for name in given.peers})

    def products(self) -> None:
        """Measure GEMMs while no service shares the GPU."""
        given = self.given
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        for tokens in given.tokens:
            value = products_s(self.shape, tokens, given.chunk, self.device, dtype, given.repeats)
            self.keep(row("linear_products", round(value, 4), "s", tokens=tokens), None)

    def everything(self) -> None:
        if not self.on_gpu and "peers" in self.given.cases:
            raise SystemExit("--cases: peers need a GPU")
        for method in self.given.methods:
            for tokens in self.given.tokens:
                self.options(method, tokens)  # raises for an impossible density before any work begins
        began = time.perf_counter()
        for files in self.given.files:
            write_model(self.model_of(files), self.shape, self.device, fp8_files=files == "fp8")
        print(f"{self.model}: made or found in {time.perf_counter() - began:.1f} s", flush=True)
        if "peers" in self.given.cases:
            peer_attention.check(self.device)
        kinds = [None if kind == "16" else kind for kind in self.given.kv_dtypes]
        for stages, kind, files in itertools.product(self.given.stages, kinds, self.given.files):
            setup = self.setup(stages, kind, files)
            self._must_fit(setup)
            if "ready" in self.given.cases:
                with self.started(setup):
                    pass
            if SERVED & {*self.given.cases}:
                self.serve(setup)
            if "cached" in self.given.cases:
                self.cached(self.setup(stages, kind, files, remembers=True))
            if "tiers" in self.given.cases:
                self.tiers(stages, kind, files)
        if "products" in self.given.cases:
            self.products()

    def _must_fit(self, setup: Setup) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()
            there = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
            fullest = setup.fullest_gib(self.given.reserve_gib)
            if fullest > there:
                raise SystemExit(
                    f"{setup.stages} stages, decode_gpu {setup.decode_gpu}, {setup.tokens} tokens: about "
                    f"{fullest:.0f} GiB on one GPU of {there:.0f}"
                )


if __name__ == "__main__":
    Run(parsed()).everything()
