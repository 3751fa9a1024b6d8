"""Tests which methods a reader compiles before its first document."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deltafront.benchmarks import reader
from deltafront.kernels.methods import MethodSpec, load
from deltafront.workers.prefill.stage import warm_up as prefill_warm_up

load("deltafront.benchmarks.whole_prompt.methods")


def test_whole_prompt_methods_are_not_warmed_up_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed: list[str] = []

    def warm_up(_stack: object, methods: list[MethodSpec], _chunk: int, _profile: object) -> None:
        warmed.extend(method.name for method in methods)

    monkeypatch.setattr(prefill_warm_up, "warm_up", warm_up)
    methods = ["dense", "flex:gamma_flex=0.8", "vertical_slash+delta", "xattention:share=0.1"]
    reader.warm_up(SimpleNamespace(device=torch.device("cuda")), methods, 4096)  # type: ignore[arg-type]
    assert warmed == ["dense", "xattention"]
