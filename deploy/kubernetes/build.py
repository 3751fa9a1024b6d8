"""`make manifests`: puts each overlay's configuration into its RayService.

An overlay's `config.yaml` is a configuration file like those in deploy/config. `serve_config` turns it into
Ray Serve's configuration. The result is the overlay's `serve.yaml`, a JSON 6902 patch, because a RayService
contains Serve's configuration as one string. A test checks that the files are up to date.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from deltafront.service.app import serve_config
from deltafront.service.config import ConfigError, ServiceConfig, parse
from deltafront.service.listening import is_local

OVERLAYS = Path(__file__).resolve().parent / "overlays"
GROUP_LABEL = "ray.io/node-group"


def overlays() -> list[Path]:
    return sorted(path.parent for path in OVERLAYS.glob("*/config.yaml"))


def patch(overlay: Path) -> str:
    """Return the content of serve.yaml. Raises ConfigError for a configuration that cannot be used."""
    content = yaml.safe_load((overlay / "config.yaml").read_text(encoding="utf-8"))
    settings = parse(content)
    if is_local(settings.door.host):
        raise ConfigError(f"{overlay}: door.host: must be 0.0.0.0, for a pod is reached at its own address")
    if not settings.model.path.startswith("/"):
        raise ConfigError(
            f"{overlay}: model.path = {settings.model.path!r}: pods reach no hub: name a directory that each "
            "of them has, in /models (the Job fetches it) or /opt/deltafront/models (in the image)"
        )
    serve = yaml.safe_dump(serve_config(content), sort_keys=False)
    lines = "".join(f"    {line}\n" for line in serve.splitlines())
    return (
        "# Made of config.yaml by make manifests.\n"
        f"- op: add\n  path: /spec/serveConfigV2\n  value: |\n{lines}"
    )


def check_labels(cluster: dict[str, Any], settings: ServiceConfig, source: str) -> None:
    """Check that each section's node_labels are among a worker group's own `labels`.

    KubeRay gives every pod its group's name as a label. But Ray's autoscaler knows the labels of future pods
    only from the group's `labels`. Without them it never starts a pod.

    Args:
        cluster: A RayService's rayClusterConfig.
        source: The cluster's name in error messages.

    Raises:
        ConfigError: No group has a section's labels, or a group lacks its own name as a label.
    """
    groups = {group["groupName"]: group.get("labels", {}) for group in cluster["workerGroupSpecs"]}
    for name, labels in groups.items():
        if labels.get(GROUP_LABEL) != name:
            raise ConfigError(f"{source}: worker group {name}: add labels: {{{GROUP_LABEL}: {name}}}")
    for section in ("prefill", "decode", "door"):
        wanted = dict(getattr(settings, section).node_labels)
        if not any(wanted.items() <= labels.items() for labels in groups.values()):
            raise ConfigError(f"{source}: {section}.node_labels: no worker group has labels {wanted}")


def rendered_cluster(overlay: Path) -> dict[str, Any] | None:
    """Return the rayClusterConfig that an overlay makes; None where kubectl is not installed. Raises
    ConfigError."""
    if shutil.which("kubectl") is None:
        return None
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{overlay}: kubectl kustomize: {done.stderr.strip()}")
    objects = yaml.safe_load_all(done.stdout)
    (service,) = [one for one in objects if one["kind"] == "RayService"]
    return dict(service["spec"]["rayClusterConfig"])


def main() -> None:
    for overlay in overlays():
        (overlay / "serve.yaml").write_text(patch(overlay), encoding="utf-8")
    for overlay in overlays():
        settings = parse(yaml.safe_load((overlay / "config.yaml").read_text(encoding="utf-8")))
        if (cluster := rendered_cluster(overlay)) is None:
            print("kubectl is not installed: labels of worker groups are not checked")
            break
        check_labels(cluster, settings, overlay.name)


if __name__ == "__main__":
    main()
