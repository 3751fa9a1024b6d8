"""A start waits until clients can use the service, and gives the reason for a failure in one line."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deltafront.service.config import parse
from deltafront.service.local import readiness
from deltafront.service.local.readiness import (
    StartError,
    failure_reason,
    is_permanent,
    wait_until_answering,
    wait_until_running,
)

from ..inprocess import House
from ..test_config import content

FAILED = """The deployment failed to start 1 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:deltafront:PrefillGroup.initialize_and_get_metadata()\x1b[39m (pid=16678)
  File "ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "workers/prefill/group/group.py", line 238, in _build
    loaded = ray.get([in_lane(stage.load, COMMANDS)() for stage in stages])
ray.exceptions.RayTaskError({name}): \x1b[36mray::StageActor.load()\x1b[39m (pid=16991, ip=1.2.3.4)
  File "workers/model/weights/stack_weights.py", line 140, in get
    raise {name}(words)
{error}"""
"""Serve's message about a replica whose stage cannot load."""
OURS = (
    "deltafront.workers.model.directory.model_files.ModelError: "
    "the weights have no tensor 'lm_head': they do not fit"
)


def failing(error: str) -> str:
    name = error.partition(":")[0].rpartition(".")[2]
    return FAILED.format(name=name, error=error)


@pytest.mark.parametrize(
    ("error", "says", "final_"),
    [
        (failing(OURS), "the weights have no tensor 'lm_head': they do not fit", True),
        (
            failing("ModuleNotFoundError: No module named 'x'"),
            "ModuleNotFoundError: No module named 'x'",
            True,
        ),
        (failing("torch.OutOfMemoryError: CUDA out"), "OutOfMemoryError: CUDA out", True),
        (
            failing("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 233. TiB"),
            "ArrayMemoryError: Unable to allocate 233. TiB",
            True,
        ),
        ("RuntimeError: Traceback (most recent call last):\n  File x", "File x", False),
        (failing("RuntimeError: connection closed by peer"), "connection closed by peer", False),
        (
            failing("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."),
            "a process ended while the service started (ActorDiedError); is there enough memory?",
            False,
        ),
        ("two lines\nwithout an error", "without an error", False),
        ("", "no reason was given", False),
    ],
)
def test_failure_reason_is_the_last_error_in_one_line(error: str, says: str, final_: bool) -> None:
    assert (failure_reason(error), is_permanent(error)) == (says, final_)


def test_every_error_is_one_line() -> None:
    from ray.exceptions import ActorDiedError, GetTimeoutError

    errors = [
        ActorDiedError(),
        GetTimeoutError("Get timed out: some object(s) not ready."),
        TimeoutError("Proxies not available after 60s."),
        ConnectionError("lines\nand lines"),
        KeyError("head"),
    ]
    assert all(failure_reason(error) and "\n" not in failure_reason(error) for error in errors)


class Serve:
    """Returns one status after another, and repeats the last one."""

    def __init__(self, *statuses: Any) -> None:
        self._statuses = list(statuses)

    def status(self) -> Any:
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        return SimpleNamespace(applications={} if status is None else {"deltafront": status})


def application(status: str, message: str = "", of_part: str = "", part: str = "UPDATING") -> Any:
    parts = {"PrefillGroup": SimpleNamespace(status=part, message=of_part)}
    return SimpleNamespace(status=status, message=message, deployments=parts)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_PERIOD_S", 0.001)


def test_start_waits_until_the_application_runs() -> None:
    wait_until_running(
        Serve(None, application("DEPLOYING"), application("RUNNING")).status, "deltafront", nothing_failed
    )


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        (application("DEPLOYING", of_part=failing(OURS)), "^PrefillGroup: the weights have no tensor"),
        (
            application("DEPLOY_FAILED", "Failed to update", failing("RuntimeError: peer"), "DEPLOY_FAILED"),
            "^PrefillGroup: peer$",
        ),
        (application("DEPLOY_FAILED", "Deploying failed: no reason"), "^Deploying failed: no reason$"),
    ],
)
def test_start_fails_with_the_applications_reason(failed: Any, says: str) -> None:
    """Our own errors end the start at once, because Serve's retries would be in vain."""
    with pytest.raises(StartError, match=says):
        wait_until_running(Serve(application("DEPLOYING"), failed).status, "deltafront", nothing_failed)


def test_start_waits_while_serve_is_still_deploying() -> None:
    trying = application("DEPLOYING", of_part=failing("RuntimeError: connection closed by peer"))
    wait_until_running(Serve(trying, application("RUNNING")).status, "deltafront", nothing_failed)


def test_start_fails_when_a_ray_process_ends() -> None:
    with pytest.raises(StartError, match=r"^Ray's node ended$"):
        wait_until_running(Serve(application("DEPLOYING")).status, "deltafront", lambda: "Ray's node ended")


def nothing_failed() -> None:
    return None


def ports(house: House, **others: int) -> Any:
    door = parse(content()).door
    return replace(door, grpc_port=int(house.address.rpartition(":")[2]), **others)


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as metrics:
        yield {"http_port": http.getsockname()[1], "metrics_port": metrics.getsockname()[1]}


def test_start_ends_once_a_door_answers_and_every_port_connects(house: House, listening: Any) -> None:
    wait_until_answering(ports(house, **listening), nothing_failed, 60)


@pytest.mark.parametrize(("port", "what"), [("http_port", "OpenAI"), ("metrics_port", "metrics")])
def test_names_a_port_without_a_listener(house: House, listening: Any, port: str, what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        listening[port] = free.getsockname()[1]
    with pytest.raises(
        StartError, match=f"^{what}: nothing listened at 127.0.0.1:{listening[port]} for 0.1 s$"
    ):
        wait_until_answering(ports(house, **listening), nothing_failed, 0.1)


def test_start_waits_until_a_door_answers_at_the_open_port(
    house: House, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_PROBE_TIMEOUT_S", 0.1)
    door = replace(ports(house, **listening), grpc_port=listening["http_port"])
    failure: Callable[[], str | None] = iter([None, "Ray's node ended"]).__next__
    with pytest.raises(StartError, match=r"^Ray's node ended$"):
        wait_until_answering(door, failure, 60)
