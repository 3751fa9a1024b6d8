"""Builds the image of this tree once, for the tests of the image and of the cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from .builder import Builder, build_image


@pytest.fixture(scope="session")
def image_builder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builder]:
    """A builder that has built IMAGE."""
    if not (request.config.getoption("--image") or request.config.getoption("--cluster")):
        pytest.skip("takes minutes: make image")
    builder = Builder(tmp_path_factory.mktemp("builder"))
    try:
        build_image(builder, compiled=request.config.getoption("--cluster"))
        yield builder
    finally:
        shutil.rmtree(builder.folder)
