"""A decode worker with two ranks gives the same answers as one with one rank, over gRPC, with a group of two
stages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltafront.service.client import (
    DeltafrontClient,
    GenerateFinished,
    PrefillFinished,
    Progress,
    Token,
)
from deltafront.service.local.server_process import LocalService

from ..chaos.running import PATIENCE_S, Service, configuration, merge, whole_of, write_model
from ..chaos.schedule import Kind, prompt, question

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DOOR = {"grpc_port": 9060, "http_port": 8060, "metrics_port": 9560, "replicas": 1, "prefix_reuse": False}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
SPARSE: dict[str, Any] = {"method": "streaming", "options": {"window": 256, "min_tokens": 0}}
LONG = prompt(5)
KILLS = 5


@contextmanager
def serving(folder: Path, ranks: int) -> Iterator[Service]:
    """Start one group and one decode worker with Δ-layers."""
    decode = {
        "workers": 1,
        "tensor_parallel": ranks,
        "page_selection": "delta",
        "full_layers": [0],
        "delta_layers": [2],
        "page_budget": 8,
        "recompute_blocks": 2,
    }
    sections: dict[str, Any] = {"prefill": {"groups": 1}, "decode": decode, "door": DOOR}
    path = folder / "ranks.yaml"
    path.write_text(yaml.safe_dump(merge(configuration(write_model(folder / "tiny")), sections)))
    with LocalService(path, start_s=PATIENCE_S) as local:
        service = Service(local.pid, whole_of(1, 2, 1, doors=1, ranks=ranks), local.address)
        with service.client() as client:
            service.seconds_to_whole(client)
        yield service


def ids(client: DeltafrontClient, *arguments: Any, **named: Any) -> list[int]:
    events = list(client.generate(*arguments, max_tokens=24, ignore_eos=True, **named))
    assert isinstance(events[-1], GenerateFinished)
    return [event.token_id for event in events if isinstance(event, Token)]


def answers(client: DeltafrontClient) -> dict[str, list[int]]:
    said = {
        "greedy": ids(client, LONG),
        "sampled": ids(client, LONG, **SAMPLED),
        "all pages": ids(client, LONG, page_selection="full"),
        "sparse": ids(client, LONG, recompute_blocks=0, **SPARSE),
        "appended": ids(client, LONG, append=question(0), recompute_blocks=2, **SPARSE),
    }
    *_, read = client.prefill(LONG, session_ttl_s=600.0, **SPARSE)
    assert isinstance(read, PrefillFinished)
    session = read.session.session_id
    for number in range(2):
        asked = {"session_id": session, "append": question(number)}
        said[f"session {number}"] = ids(client, recompute_blocks=0, **asked)
        said[f"session {number}, recomputed"] = ids(client, recompute_blocks=2, **asked)
        said[f"session {number}, sampled"] = ids(client, recompute_blocks=0, **asked, **SAMPLED)
    client.release(session)
    return said


def answer_over_a_death(service: Service, client: DeltafrontClient) -> tuple[list[int], GenerateFinished]:
    """Get an answer while a stage is killed after two fifths of the prompt."""
    said, killed = list[int](), False
    for event in client.generate(LONG, max_tokens=24, ignore_eos=True, method="dense"):
        if isinstance(event, Progress) and not killed and event.tokens_done >= 0.4 * event.tokens_total:
            os.kill(service.processes()[Kind.STAGE][-1].pid, signal.SIGKILL)
            killed = True
        elif isinstance(event, Token):
            said.append(event.token_id)
        elif isinstance(event, GenerateFinished):
            finish = event
    assert killed
    return said, finish


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """Compares greedy and sampled answers, sessions, questions, recomputed blocks, and a prompt that is
    resumed after a stage's death with KV from both ranks."""
    said = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        with serving(folder, ranks) as service, service.client() as client:
            said.append(answers(client))
            for _ in range(KILLS):  # try again if the kill comes after prefill
                service.seconds_to_whole(client)
                said[-1]["over a death"], finish = answer_over_a_death(service, client)
                if finish.timings.parts.get("replay"):
                    break
            assert finish.timings.parts["replay"] > 0
            service.seconds_to_no_page(client)
    assert said[0] == said[1]
    assert said[0]["sparse"] != said[0]["greedy"] != said[0]["sampled"], "they tell the cases apart"
