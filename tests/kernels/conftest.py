"""Fixtures of kernel tests."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.attention.hopper import launch


@pytest.fixture(params=[False, True] if torch.cuda.is_available() else [False])
def split_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On a GPU, run a test twice: Hopper's dense attention never and always splits keys."""
    monkeypatch.setattr(launch, "few", lambda *_: request.param)
    return bool(request.param)
