"""Tests that actors report progress while they load, and compiled kernels afterwards. They are called without
Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltafront.kernels.compilations import Compilations
from deltafront.workers.decode import worker
from deltafront.workers.prefill.group import group
from deltafront.workers.progress import progress
from deltafront.workers.settings import DecodeConfig, HandoffConfig, ModelSpec, PrefillConfig
from deltafront.workers.tracing import SpanSink

from .tiny_model import make_tiny_model

CONFIG = PrefillConfig(stages=1, chunk_tokens=128, cache_tokens=512)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    context = SimpleNamespace(get_node_id=lambda: "node")
    for module in (group, worker):
        monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    return ModelSpec(path=str(make_tiny_model(tmp_path)), dtype="float32")


@dataclass
class Method:
    """An actor's method, called in this process."""

    run: Callable[[], Any]

    def options(self, **_: Any) -> Method:
        return self

    def remote(self) -> Awaitable[Any]:
        async def answer() -> Any:
            return self.run()

        return answer()


async def test_group_reports_the_kernels_its_stages_compiled(
    model: ModelSpec, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = group.StageActor(model, CONFIG, HandoffConfig(), SpanSink(), None, 1, 0)
    stage.load()
    assert "stage 0 of 1: loaded 5 of 5 layers after" in capfd.readouterr().err
    assert stage._compilations.ready, "what is compiled from now on, a request waits for"
    stage._compilations = Compilations(warm_up=7, serving=2)
    actor = SimpleNamespace(compilations=Method(stage.compilations), pages_used=Method(lambda: 0))
    about = {"nodes": ("node",), "work": None, "pairing": "", "spans": SpanSink()}
    controller = group.ControllerActor("prefill:x", [actor, actor], CONFIG, **about)
    assert (await controller.stats()).compilations == ()
    assert await controller.check() == ""
    await asyncio.wait_for(controller._counting, 60)
    assert dict((await controller.stats()).compilations) == {"warm_up": 14, "serving": 4}


async def test_a_decode_worker_counts_as_serving_once_it_has_started(
    model: ModelSpec, capfd: pytest.CaptureFixture[str]
) -> None:
    config = DecodeConfig(cache_tokens=512, page_selection="full", full_layers=(0,))
    actor = worker.DecodeActor("decode:x", model, config, HandoffConfig(), SpanSink())
    assert "decode:x: loaded 5 of 5 layers after" in capfd.readouterr().err
    actor._compilations.count("kernel", 0.1, loaded=False)
    await actor.start()
    actor._compilations.count("kernel", 0.1, loaded=True)
    assert dict((await actor.stats()).compilations) == {"warm_up": 1, "serving": 1}
    await actor.hosted.close()


def test_progress_line_names_worker_step_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([10.0, 12.5])
    progress("stage 1 of 2", lambda: next(times))("loaded 8 of 16 layers")
    assert capsys.readouterr().err == "stage 1 of 2: loaded 8 of 16 layers after 2.5 s\n"
