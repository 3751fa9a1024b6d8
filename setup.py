"""Lists the packages that serve, with the root's own name before them. All else runs from a checkout."""

from setuptools import find_packages, setup

FOLDERS = ("kernels", "protos", "service", "workers")

found = find_packages(include=[name for folder in FOLDERS for name in (folder, f"{folder}.*")])
setup(packages=["deltafront", *(f"deltafront.{name}" for name in found)])
