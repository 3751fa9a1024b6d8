"""A real service of tiny models, with linear attention or rolling buffers in three of four layers: answers
equal transformers', and later prompts continue from cached states."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.local.server_process import LocalService
from deltafront.workers.model.directory.store import located
from deltafront.workers.settings import ModelSpec

from ..workers.tiny_hybrid import make_tiny_hybrid
from ..workers.tiny_model import greedy
from ..workers.tiny_windows import make_tiny_windows
from .wire import Answer, Wire, packed

TOKENS, NEW, SPACING = 500, 20, 128
EMBEDDED = "smollm2-135m-instruct"
SETTINGS: dict[str, Any] = {
    "prefill": {"chunk_tokens": 128, "cache_tokens": 4096, "threads": 1, "cpus_per_stage": 0.25},
    "decode": {"cache_tokens": 4096, "page_selection": "full", "threads": 1, "cpus": 0.25, "state_slots": 40},
    "door": {
        "replicas": 1,
        "grpc_port": 9020,
        "http_port": 8020,
        "metrics_port": 9484,
        "state_spacing": SPACING,
    },
}


@pytest.fixture(
    scope="module",
    params=[("linear", "object_store", 2, 2), ("rolling", "mapped", 1, 1)],
    ids=lambda given: given[0],
)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The configuration of a tiny model with the embedded model's tokenizer."""
    kind, transport, stages, ranks = request.param
    tokenizer = Path(located(ModelSpec(path=EMBEDDED)).path)
    make = make_tiny_hybrid if kind == "linear" else make_tiny_windows
    directory = make(tmp_path_factory.mktemp(kind), vocabulary=49_152)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, directory)
    model = {"path": str(directory), "dtype": "float32", "rolling_buffer": kind == "rolling"}
    prefill = SETTINGS["prefill"] | {"stages": stages}
    decode = SETTINGS["decode"] | {"tensor_parallel": ranks, "host_cache_gib": 0.1}
    given = {"prefill": prefill, "decode": decode, "model": model, "handoff": {"transport": transport}}
    return SETTINGS | given


@pytest.fixture(scope="module")
def service(settings: dict[str, Any], tmp_path_factory: Any) -> Iterator[LocalService]:
    file = tmp_path_factory.mktemp("config") / "states.yaml"
    file.write_text(yaml.safe_dump(settings))
    with LocalService(file, start_s=600) as running:
        yield running


@pytest.fixture(scope="module")
def expected(settings: dict[str, Any]) -> Callable[[list[int]], list[int]]:
    return greedy(Path(settings["model"]["path"]), NEW)


def drawn(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 49_000), k=count)


def ask(wire: Wire, ids: list[int], salt: str = "states", **more: Any) -> Answer:
    sampling = pb.SamplingOptions(max_tokens=NEW, ignore_eos=True)
    prompt = pb.Prompt(token_ids=packed(ids))
    return wire.generate(pb.GenerateRequest(prompt=prompt, sampling=sampling, cache_salt=salt, **more))


def test_each_turn_continues_from_the_last_ones_state(service: LocalService, expected: Any) -> None:
    wire, ids = Wire(service.address), drawn(TOKENS, 1)
    for turn in range(4):
        answer = ask(wire, ids)
        assert answer.token_ids == expected(ids)
        cached = (len(ids) - 31) // 16 * 16 if turn else 0  # all but 30 tokens, and the answer's last
        assert answer.finish.usage.cached_tokens == cached
        ids = [*ids, *answer.token_ids, *drawn(30, turn + 2)]
    wire.seconds_to_no_page()


def test_prompts_with_one_document_share_its_states(service: LocalService, expected: Any) -> None:
    wire, document = Wire(service.address), drawn(TOKENS, 10)
    first, second = (document + drawn(40, seed) for seed in (11, 12))
    assert ask(wire, first, "document").token_ids == expected(first)
    answer = ask(wire, second, "document")
    assert answer.token_ids == expected(second)
    assert answer.finish.usage.cached_tokens == TOKENS // SPACING * SPACING
    wire.seconds_to_no_page()


def test_session_answers_questions(service: LocalService, expected: Any) -> None:
    wire, document = Wire(service.address), drawn(300, 20)
    prompt = pb.Prompt(token_ids=packed(document))
    session = wire.prefill(pb.PrefillRequest(prompt=prompt)).session
    for seed in (21, 22):
        question = drawn(25, seed)
        asked = pb.GenerateRequest(
            session_id=session.session_id,
            append=pb.Prompt(token_ids=packed(question)),
            sampling=pb.SamplingOptions(max_tokens=NEW, ignore_eos=True),
        )
        assert wire.generate(asked).token_ids == expected(document + question)
    wire.stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session.session_id))
    wire.seconds_to_no_page()
