"""`make manifests`: puts each overlay's configuration into its RayService.

An overlay's `config.yaml` is a configuration file like those in deploy/config. What Ray Serve needs around it
is `serve_config`'s business, and the result is an overlay's `serve.yaml`: a JSON 6902 patch, because a
RayService carries it as one string. A test compares the files with what this makes of them.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from deltafront.service.app import serve_config
from deltafront.service.config import ConfigError, parse
from deltafront.service.listening import is_local

OVERLAYS = Path(__file__).resolve().parent / "overlays"


def overlays() -> list[Path]:
    return sorted(path.parent for path in OVERLAYS.glob("*/config.yaml"))


def patch(overlay: Path) -> str:
    """The content of serve.yaml. Raises ConfigError for a configuration that cannot be used."""
    content = yaml.safe_load((overlay / "config.yaml").read_text(encoding="utf-8"))
    if is_local(parse(content).door.host):
        raise ConfigError(f"{overlay}: door.host: must be 0.0.0.0, for a pod is reached at its own address")
    serve = yaml.safe_dump(serve_config(content), sort_keys=False)
    lines = "".join(f"    {line}\n" for line in serve.splitlines())
    return (
        "# Made of config.yaml by make manifests.\n"
        f"- op: add\n  path: /spec/serveConfigV2\n  value: |\n{lines}"
    )


def main() -> None:
    for overlay in overlays():
        (overlay / "serve.yaml").write_text(patch(overlay), encoding="utf-8")


if __name__ == "__main__":
    main()
