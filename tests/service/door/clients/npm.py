"""Packages from npm, in the clients' own environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "npm"


def installed(*packages: str) -> bool:
    """Install packages into FOLDER. Returns False without npm."""
    npm = shutil.which("npm")
    if npm is not None:
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(FOLDER), *packages]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return npm is not None
