"""Fixtures: a tiny random Llama, and a decode engine on it. Plain code prefills its prompts."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from deltafront.tests.workers.in_ranks import followers, parts
from deltafront.tests.workers.tiny_model import make_tiny_model, whole_stack
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.kv.handoff.object_store import ObjectStoreReader
from deltafront.workers.messages.events import FinishEvent, FirstTokenTimings, Token
from deltafront.workers.messages.requests import GenerateJob, RequestOptions, Reservation, Reserved, Sampling
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.grammars import Grammars
from deltafront.workers.settings import DecodeConfig, ModelSpec
from deltafront.workers.tracing import NO_TRACER, Tracer

LAYERS = 6


def reference_without_fla() -> None:
    """Let transformers compute linear attention in PyTorch. It chooses when these modules are imported: where
    flash-linear-attention is installed, its GPU kernels, for tensors of the CPU too."""
    sys.modules["fla"] = None  # type: ignore[assignment]  # so that importing it fails
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    del sys.modules["fla"]


if importlib.util.find_spec("fla"):
    reference_without_fla()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start one Ray for a file's tests of actors. The next file may start its own service in this process."""
    import ray

    from deltafront.service import listening
    from deltafront.service.local.ray_patches import slow_start

    patch = pytest.MonkeyPatch()
    for name, value in (listening.token() | listening.loopback()).items():
        patch.setenv(name, value)
    with listening.at_loopback(), slow_start(9030):
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            num_cpus=4,
            log_to_driver=False,
            configure_logging=False,
        )
    yield ray
    ray.shutdown()
    patch.undo()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Return `make_tiny_model`'s model. Tests must not change it."""
    return ModelSpec(path=str(make_tiny_model(tmp_path_factory.mktemp("tiny"))), dtype="float32")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Llama: 6 layers, 4 query heads on 2 KV heads of dimension 16, 1024 positions, fp32."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eos_token_id": 198,
        "bos_token_id": 1,
    }
    directory = tmp_path_factory.mktemp("tiny-llama")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")  # not read, but every model directory needs one
    generator = torch.Generator().manual_seed(9)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.2
        for name, shape in read_config(directory).shapes().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def tiny_stack(tiny_llama: Path) -> LayerStack:
    return whole_stack(tiny_llama)


@dataclass
class Prefilled:
    """A prompt's KV (numpy [T, G, D] pairs by layer) and the logits at its last position."""

    kv: list[tuple[np.ndarray, np.ndarray]]
    logits: np.ndarray


@dataclass
class Answer:
    """The events that one `generate` call has yielded."""

    first: FirstTokenTimings | None = None
    tokens: list[Token] = field(default_factory=list)
    finish: FinishEvent | None = None

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.tokens]


class Bench:
    """A started engine, and helpers that call it."""

    def __init__(self, engine: DecodeEngine, stack: LayerStack) -> None:
        self.engine = engine
        self.stack = stack
        self.may_fault = False

    @property
    def used(self) -> int:
        return self.engine._manager.pool.used

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> Prefilled:
        kv: list[tuple[np.ndarray, np.ndarray]] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv.append((k.numpy().copy(), v.numpy().copy()))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        hidden = self.stack.forward(self.stack.embed(torch.tensor(ids)), torch.arange(len(ids)), attend)
        return Prefilled(kv, self.stack.logits(hidden[-1:])[0].numpy())

    def pieces(
        self, request_id: str, prompt: Prefilled, chunk: int = 32, attempt: int = 0
    ) -> list[KVAnnouncement]:
        """Return the KV announcements of a prompt, chunk by chunk and layer by layer."""
        total = len(prompt.kv[0][0])
        return [
            KVAnnouncement(
                request_id=request_id,
                layer=layer,
                start=start,
                tokens=min(chunk, total - start),
                payload=tuple(np.ascontiguousarray(x[start : start + chunk]) for x in prompt.kv[layer]),
                attempt=attempt,
            )
            for start in range(0, total, chunk)
            for layer in range(len(prompt.kv))
        ]

    async def deliver(self, request_id: str, ids: list[int], chunk: int = 32) -> None:
        """Prefill a reserved request, and send the engine all KV and the logits."""
        prompt = self.prefill(ids)
        await asyncio.gather(
            *(self.engine.announce(piece) for piece in self.pieces(request_id, prompt, chunk))
        )
        await self.deliver_logits(request_id, prompt)

    async def deliver_logits(self, request_id: str, prompt: Prefilled) -> None:
        await self.engine.first_logits(FirstLogits(request_id=request_id, logits=prompt.logits))

    async def reserve(self, request_id: str, prompt: int, new: int, **more: Any) -> Reserved:
        """Reserve a request. `more` are fields of the reservation or of its options."""
        names = {field.name for field in fields(RequestOptions)} & more.keys()
        options = RequestOptions(**{name: more.pop(name) for name in names})
        given = {"owner": "me", "options": options, **more}
        answer = await self.engine.reserve(
            Reservation(request_id=request_id, new_tokens=prompt, max_tokens=new, **given)
        )
        assert isinstance(answer, Reserved), answer
        return answer

    async def collect(self, job: GenerateJob) -> Answer:
        """Read an answer's stream to its end, and check the order of its events."""
        answer = Answer()
        async for event in self.engine.generate(job):
            assert answer.finish is None, "nothing may follow the finish"
            if isinstance(event, FirstTokenTimings):
                assert answer.first is None and not answer.tokens
                answer.first = event
            elif isinstance(event, Token):
                assert answer.first is not None and event.index == len(answer.tokens)
                answer.tokens.append(event)
            else:
                answer.finish = event
        assert answer.finish is not None and answer.finish.completion_tokens == len(answer.tokens)
        return answer

    async def ask(
        self, request_id: str, ids: list[int], sampling: Sampling, keep_tokens: int = 0, **more: Any
    ) -> Answer:
        """Reserve, prefill and generate."""
        await self.reserve(request_id, len(ids), sampling.max_tokens, keep_tokens=keep_tokens, **more)
        await self.deliver(request_id, ids)
        return await self.collect(
            GenerateJob(request_id=request_id, sampling=sampling, keep_tokens=keep_tokens)
        )

    async def ask_session(
        self, request_id: str, session_id: str, ids: list[int], sampling: Sampling, **more: Any
    ) -> Answer:
        await self.reserve(request_id, len(ids), sampling.max_tokens, session_id=session_id, **more)
        packed = np.asarray(ids, dtype="<u4").tobytes()
        return await self.collect(GenerateJob(request_id=request_id, sampling=sampling, extend_ids=packed))


@pytest.fixture
def single_rank(request: pytest.FixtureRequest) -> None:
    """Skip a test with several ranks. For tests that inspect rank 0 or make it fail, where other ranks would
    hang."""
    if request.config.getoption("--ranks") > 1:
        pytest.skip("for a single rank")


@pytest.fixture
async def bench(
    request: pytest.FixtureRequest, tiny_llama: Path, tiny_stack: LayerStack
) -> AsyncIterator[Callable[..., Any]]:
    """`await bench(key=value…)` starts an engine with this DecodeConfig. At the end, all its pages must be
    free. With `pytest --ranks N` it has N ranks.

    looks_ahead: as on a GPU, a step is launched before the previous step's tokens have arrived.
    """
    benches: list[Bench] = []
    ranks, closing = request.config.getoption("--ranks"), ExitStack()

    async def start(
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        reader: Callable[..., Any] = ObjectStoreReader,
        looks_ahead: bool = False,
        tracer: Tracer = NO_TRACER,
        grammars: Grammars | None = None,
        **config: Any,
    ) -> Bench:
        defaults = {
            "cache_tokens": 8192,
            "page_selection": "full",
            "append_chunk_tokens": 48,
            "stream_lease_s": 600.0,
        }
        chosen = DecodeConfig(**(defaults | config))
        stacks = [tiny_stack] if ranks == 1 else parts(tiny_llama, ranks)
        others = closing.enter_context(followers(stacks, chosen, reader))
        engine = DecodeEngine(
            "decode:test",
            stacks[0],
            chosen,
            reader=reader,
            ranks=others,
            wall=wall,
            clock=clock,
            tracer=tracer,
            grammars=grammars,
        )
        engine._runner.asynchronous = looks_ahead
        await engine.start()
        benches.append(Bench(engine, tiny_stack))
        return benches[-1]

    yield start
    for made in benches:
        fault = made.engine.fault
        await made.engine.close()
        assert made.used == 0, "pages leaked"
        assert made.may_fault or not fault
    closing.close()
