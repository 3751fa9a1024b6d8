"""Third-party clients, in their own environment, with a door and a scripted worker.

The test is about the clients' parsing, so the worker's answers are scripted: it calls the first tool, and
answers once it has the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.door.batches.routes import BatchOptions
from deltafront.service.door.batches.storage import Storage
from deltafront.service.door.http_door import HttpDoor

from ....environments import python_with
from ...fakes import EOS, FakeDecode
from ...inprocess import House, settings
from ..test_tools import call, model_with_tools

HERE = Path(__file__).parent
ENVIRONMENTS = dict.fromkeys(("litellm_proxy", "llama_index"), "older") | {
    "aider": "aider", "benchmarks": "benchmarks", "open_webui": "open_webui",
}  # fmt: skip
"""The environments, by their file of requirements, of clients that need other versions than most."""
MODEL = "owner/tiny"
ARGUMENTS = '{"city": "Rome", "days": 3}'
_COMMAND = '{"command": "true", "description": "t"}'
COMMANDS = {
    "Bash": _COMMAND, "bash": _COMMAND, "exec_command": '{"cmd": "true"}',
    "run_commands": '{"commands": ["true"]}',
}  # fmt: skip
"""Calls of Claude Code's, opencode's, Codex' and cline's tools."""
CLIENTS = sorted(path.stem.removeprefix("run_") for path in HERE.glob("run_*.py"))
_TOOLS, _TOOLS_END = "[tools:", "<tool_call>\n]"


class ScriptedDecode(FakeDecode):
    def _grammar(self, request: Any, job: Any) -> Any:
        """Choose the script once the prompt is known."""
        prompt = bytes(
            number for number in memoryview(request.ids + job.extend_ids).cast("I") if number < 256
        )
        form = bool(request.reservation.options.constraint)
        self.script = [*script_for(prompt.decode(), form).encode(), EOS]
        return super()._grammar(request, job)


def script_for(prompt: str, form: bool) -> str:
    tools = prompt.partition(_TOOLS)[2].partition(_TOOLS_END)[0]
    if "[tool:" in prompt or not (tools or form):
        return "Sunny in Rome."
    if not tools:
        return ARGUMENTS
    functions = {one["function"]["name"]: one["function"] for one in json.loads(tools)}
    for name in COMMANDS.keys() & functions:
        return call(name, COMMANDS[name])
    function = next(iter(functions.values()))
    arguments = ARGUMENTS if function.get("parameters", {}).get("properties") else "{}"
    return call(function["name"], arguments)


@pytest.fixture
def clients_python(client: str) -> Path:
    own = ENVIRONMENTS.get(client)
    return python_with(HERE / f"{own or 'requirements'}.txt", f"clients-{own}" if own else "clients")


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    model = model_with_tools(tmp_path / "model", positions=1 << 17)
    house = make_house(settings(model, model_name=MODEL, default_max_tokens=512))
    house.decode.__class__ = ScriptedDecode
    house.decode.total = house.group.total = 1 << 14
    return house


@pytest.fixture
def address(
    house: House, make_http: Callable[..., str], http_doors: list[HttpDoor], tmp_path: Path
) -> Iterator[str]:
    options = BatchOptions(Storage(str(tmp_path)), 1 << 24, 4, "one", house.metrics.count_batch_lines)
    made = make_http(house, batches=options)
    runner = http_doors[-1].batches
    assert runner is not None
    house.loop.loop.call_soon_threadsafe(runner.start)
    yield made
    house.loop.run(runner.stop())


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENTS)
def test_every_call_of_a_public_client_works_or_is_refused_by_name(
    clients_python: Path, client: str, address: str
) -> None:
    command = [clients_python, HERE / f"run_{client}.py", address, MODEL, sysconfig.get_path("purelib")]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    rows = [json.loads(line[5:]) for line in ran.stdout.splitlines() if line.startswith("row: ")]
    for name, outcome in rows:
        print(f"{client:14} {name:22} {outcome}")
    assert rows and not ran.returncode, ran.stderr
    failed = [f"{name} {outcome}" for name, outcome in rows if outcome.startswith("fails")]
    assert not failed, "\n".join(failed)
