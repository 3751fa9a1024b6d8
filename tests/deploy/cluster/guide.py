"""Runs commands of docs/deploy.md's guide as they are written.

Not run, because the cluster has them or cannot: `docker` and `helm` (registry, GPU operator, Prometheus; the
operator of KubeRay is there). Replaced: the overlay by a smaller one of the same form, and the book.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..manifests import ROOT
from ..test_guide import commands
from .kube import REGISTRY, WAIT_S

NEVER_RUN = ("docker ", "helm ")


@dataclass(frozen=True)
class Guide:
    """folder: the overlay, and programs that reach the cluster. maker: see conftest.MAKER."""

    folder: Path
    maker: str | None

    def lines(self) -> list[str]:
        (self.folder / "book.txt").write_text("Queequeg is a harpooneer from an island. " * 8)
        replaced = {"deploy/kubernetes/overlays/one-gpu": self.folder, "book.txt": self.folder / "book.txt"}
        lines = [line for line in commands() if not line.startswith(NEVER_RUN)]
        for old, new in replaced.items():
            assert sum(old in line for line in lines) == 1, f"the guide has {old} once"
            lines = [line.replace(old, str(new)) for line in lines]
        return lines

    def run(self, *starts: str) -> str:
        """Run the commands that begin with `starts` in one shell, and return their output."""
        lines = [line for line in self.lines() if line.startswith(starts)]
        assert len(lines) >= len(starts), starts
        programs = self.folder / "programs"
        programs.mkdir(exist_ok=True)
        venv = Path(sys.executable).parent
        inside = {"kubectl": "kubectl", "deltafront": f"run {venv}/deltafront"} if self.maker else {}
        for name, command in inside.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {self.maker} {command} "$@"\n')
            (programs / name).chmod(0o755)
        more = {"REGISTRY": REGISTRY, "HF_TOKEN": ""}
        more["PATH"] = f"{programs}:{venv}:{os.environ['PATH']}"
        script = "\n".join(["set -e -o pipefail", *lines])
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env=os.environ | more,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            start_new_session=True,
        )
        try:
            shell.wait(WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # only `port-forward` outlives the shell
                os.killpg(shell.pid, signal.SIGTERM)
        assert shell.stdout is not None
        said = shell.stdout.read()
        assert shell.returncode == 0, f"{script}\n{said}"
        return said
