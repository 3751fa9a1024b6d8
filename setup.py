"""What pyproject.toml cannot say: every package under the root, with the root's own name before it."""

from setuptools import find_packages, setup

FOLDERS = ("benchmarks", "dashboards", "kernels", "protos", "service", "workers")

found = find_packages(include=[name for folder in FOLDERS for name in (folder, f"{folder}.*")])
setup(packages=["deltafront", *(f"deltafront.{name}" for name in found)])
