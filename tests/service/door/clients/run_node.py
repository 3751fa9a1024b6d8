"""OpenAI's client for Node and the AI SDK, from npm: chat, Responses, tools, structured output."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from npm import FOLDER, installed
from rows import ANSWER, BASE, MARK, MODEL, QUESTION

PACKAGES = (
    "openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7",
)  # fmt: skip
SCRIPT = "node_clients.mjs"

if installed(*PACKAGES):
    shutil.copy(Path(__file__).parent / SCRIPT, FOLDER)  # Node looks for packages beside the script
    subprocess.run(["node", FOLDER / SCRIPT, BASE, MODEL, QUESTION, ANSWER], check=True)
else:
    print(MARK + json.dumps(["npm", "skipped: npm is not installed"]))
