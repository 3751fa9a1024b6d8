"""JSON log lines of actors and drivers, and of the audit log."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray._common.formatters import JSONFormatter

from deltafront.service.request.audit import Audit
from deltafront.workers import logs

_ACTOR = """
import logging
import ray
from deltafront.workers import logs

@ray.remote
class Actor:
    def line(self):
        import deltafront.workers.remote
        (handler,) = logging.getLogger().handlers
        made = logging.getLogger("deltafront.actor").makeRecord(
            "deltafront.actor", logging.INFO, "file", 1, "started", (), None, extra={"request_id": "r"}
        )
        return handler.format(made)

ray.init(address="local", num_cpus=1, include_dashboard=False)
logs.name_loggers()
logging.getLogger("deltafront.driver").info("ready")
print(ray.get(Actor.remote().line.remote()))
ray.shutdown()
"""


@pytest.mark.service
def test_actors_and_drivers_write_json_lines_with_their_logger() -> None:
    environment = os.environ | {"RAY_LOGGING_CONFIG_ENCODING": "JSON", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _ACTOR],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    ours = {line["name"]: line for line in lines if line.get("name", "").startswith("deltafront.")}
    assert {name: line["message"] for name, line in ours.items()} == {
        "deltafront.actor": "started",
        "deltafront.driver": "ready",
    }
    assert ours["deltafront.actor"]["request_id"] == "r"
    assert all(line["levelname"] == "INFO" and line["asctime"] for line in ours.values())


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Yield what the root logger writes as JSON."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(JSONFormatter())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_json_audit_lines_have_the_fields_of_their_request(written: io.StringIO) -> None:
    logs.name_loggers()
    line = Audit("Generate", request_id="r", token="t").write("finished", 1.5)
    found = json.loads(written.getvalue())
    assert found["name"] == "deltafront.audit" and found["levelname"] == "INFO" and found["asctime"]
    assert found.items() >= line.items(), "each field of the audit line is a field of the JSON line"
    assert json.loads(found["message"]) == line
