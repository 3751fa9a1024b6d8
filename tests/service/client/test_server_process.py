"""A service as a child process: where it is, before it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltafront.service.client.server_process import LocalService
from deltafront.service.config import ConfigError


def written(folder: Path, door: str) -> Path:
    path = folder / "service.yaml"
    path.write_text(f"model: {{path: m}}\ndecode: {{page_selection: full}}\ndoor: {{{door}}}\n")
    return path


def test_it_is_looked_for_where_its_configuration_says(tmp_path: Path) -> None:
    assert LocalService(written(tmp_path, "")).address == "127.0.0.1:9000"
    assert LocalService(str(written(tmp_path, "grpc_port: 9123"))).address == "127.0.0.1:9123"


def test_a_mistake_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpc_port'"):
        LocalService(written(tmp_path, "grcp_port: 9123"))
