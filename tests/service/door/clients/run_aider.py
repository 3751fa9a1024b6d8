"""aider, in an empty home: a question, answered at once and streamed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import ANSWER, BASE, MODEL, QUESTION, case, main

OPTIONS = (
    "--no-git --no-check-update --analytics-disable --yes-always --no-show-model-warnings --no-pretty "
    "--map-tokens 0 --chat-mode ask"
).split()  # fmt: skip
TIMEOUT_S = 300


def ask(question: str, stream: str = "--stream") -> str:
    """Run aider with one question, and return what it prints."""
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}", *OPTIONS, stream]
    with tempfile.TemporaryDirectory() as home:
        own = {"HOME": home, "OPENAI_API_BASE": f"{BASE}/v1", "OPENAI_API_KEY": "any"}
        offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        ran = subprocess.run(
            [*command, "--message", question], cwd=home, env={**os.environ, **own, **offline},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
    return ran.stdout


@case
def chat() -> None:
    assert ANSWER in ask(QUESTION, "--no-stream")


@case
def stream() -> None:
    said = ask(QUESTION)
    assert ANSWER in said and "Tokens: " in said, said


main()
