"""Claude Code, Codex, opencode and cline, from npm, without their clouds: a call, its result, the answer."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import Any

from npm import FOLDER, installed
from rows import ANSWER, BASE, MODEL, QUESTION, case, main

PACKAGES = (
    "@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0", "opencode-ai@1.18.33", "cline@3.0.65",
)  # fmt: skip
PROVIDER = f'{{name="door", base_url="{BASE}/v1", wire_api="responses"}}'
CODEX = {
    "model": MODEL, "model_provider": "door", "model_providers.door": PROVIDER,
    "web_search": "disabled", "agents.enabled": "false",
}  # fmt: skip
CLAUDE = {
    "ANTHROPIC_BASE_URL": BASE, "ANTHROPIC_API_KEY": "any", "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip
OPENCODE: dict[str, Any] = {
    "model": f"door/{MODEL}", "small_model": f"door/{MODEL}", "permission": {"bash": "allow"},
    "provider": {"door": {
        "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{BASE}/v1", "apiKey": "any"},
        "models": {MODEL: {"tool_call": True, "limit": {"context": 100_000, "output": 400}}},
    }},
}  # fmt: skip
TIMEOUT_S = 120


def run(name: str, *arguments: str, **environment: str) -> str:
    """Run an agent in an empty home, and return its output."""
    with tempfile.TemporaryDirectory() as home:
        command = [str(FOLDER / "node_modules" / ".bin" / name), *arguments]
        given = {"PATH": os.environ["PATH"], "HOME": home, **environment}
        ran = subprocess.run(
            command, cwd=home, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert not ran.returncode, ran.stdout + ran.stderr
    return ran.stdout


def claude_code() -> None:
    said = run("claude", "-p", QUESTION, "--allowedTools", "Bash", "--output-format", "json", **CLAUDE)
    answer: dict[str, Any] = json.loads(said)
    assert (answer["result"], answer["num_turns"], answer["is_error"]) == (ANSWER, 2, False), said


def codex() -> None:
    settings = [part for name, value in CODEX.items() for part in ("-c", f"{name}={value}")]
    said = run("codex", "exec", "--skip-git-repo-check", "--json", *settings, QUESTION)
    items = [json.loads(line).get("item", {}) for line in said.splitlines() if line.startswith("{")]
    assert [item["exit_code"] for item in items if item.get("status") == "completed"] == [0], said
    assert items[-2].get("text") == ANSWER, said


def opencode() -> None:
    offline = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    settings = {"OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE), **offline}
    said = run("opencode", "run", "--format", "json", QUESTION, **settings)
    parts = [json.loads(line)["part"] for line in said.splitlines()]
    assert [part["state"]["status"] for part in parts if part["type"] == "tool"] == ["completed"], said
    assert [part["text"] for part in parts if part["type"] == "text"] == [ANSWER], said


def cline() -> None:
    provider = ("-p", "openai-compatible", "-k", "any", "-m", MODEL, "-b", f"{BASE}/v1")
    with tempfile.TemporaryDirectory() as data:  # in a folder of its own it starts no daemon
        run("cline", "auth", *provider, "--data-dir", data)
        said = run("cline", "--json", "--data-dir", data, QUESTION)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    done = [event["event"] for event in events if event.get("event", {}).get("type") == "content_end"]
    results = [part["output"][0]["success"] for part in done if part["contentType"] == "tool"]
    assert results == [True], said
    assert (events[-1]["text"], events[-1]["iterations"]) == (ANSWER, 2), said


for agent in (claude_code, codex, opencode, cline) if installed(*PACKAGES) else ():
    case(agent)


@case
def npm() -> str | None:
    return None if FOLDER.exists() else "skipped: npm is not installed"


main()
