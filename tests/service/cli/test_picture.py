"""`deltafront picture` on a tiny model draws the tiles that were computed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from deltafront.kernels.methods import method_spec
from deltafront.service.cli import drawing
from deltafront.service.client import Timings
from deltafront.workers.calibration.tiles import TilesRead, tiles_read
from deltafront.workers.settings import ModelSpec

from ...workers.tiny_model import HEADS, LAYERS
from ..inprocess import House
from .test_calibrate import PROSE, model  # noqa: F401  a fixture
from .test_main import run

TOKENS = 640
IDS = [ord(letter) - 97 if letter != " " else 26 for letter in PROSE[:TOKENS]]
OPTIONS = ("--method", "streaming", "--option", "min_tokens=0", "--option", "window=1")
TIMINGS = Timings(2.0, {"tokenize": 0.5, "prefill.attention": 1.4999, "transport": 0.0001}, [], 3.0)


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:  # noqa: F811
    (tmp_path / "text.txt").write_text(PROSE)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{path: {model}, dtype: float32}}\n"
        "prefill: {chunk_tokens: 256, device: cpu}\n"
        "decode: {page_selection: full}\n"
    )
    return path


def picture(config: Path, *arguments: object) -> Any:
    return run("picture", config.with_name("text.txt"), "-c", config, "--tokens", TOKENS, *arguments)


def expected(config: Path) -> TilesRead:
    path = config.read_text().split("path: ")[1].split(",")[0]
    spec = method_spec("streaming", {"min_tokens": 0, "window": 1})
    return tiles_read(ModelSpec(path=path, dtype="float32"), IDS, spec, 256)


def test_picture_in_the_terminal_shows_every_layer_and_head(config: Path) -> None:
    done = picture(config, *OPTIONS)
    assert done.exit_code == 0, done.output
    title, *lines = done.stdout.splitlines()
    density = expected(config).density_LH
    assert title == f"streaming: {density.mean():.1%} of the tiles of {TOKENS} tokens"
    assert [line.rstrip() for line in lines[:5]] == ["██", "████", "██··██", "██····██", "██······██"]
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == LAYERS
    assert all(row.count("▓▓") + row.count("██") == HEADS for row in rows), rows


def test_picture_file_has_a_tile_map_for_every_head(config: Path, tmp_path: Path) -> None:
    done = picture(config, *OPTIONS, "--png", tmp_path / "tiles.png")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'tiles.png'}\n"), done.output
    image = np.asarray(Image.open(tmp_path / "tiles.png"))
    found = expected(config)
    side, scale = 95, 19  # 5 tiles of 19 pixels
    for layer in range(LAYERS):
        for head in range(HEADS):
            top, left = 16 + 36 + layer * (side + 6), 16 + 72 + head * (side + 6)
            seen = image[top : top + side : scale, left : left + side : scale]
            assert (seen == drawing._READ).all(-1).tolist() == found.read_LHNM[layer, head].tolist()
            causal = np.tri(5, dtype=bool) & ~found.read_LHNM[layer, head]
            assert (seen == drawing._CAUSAL).all(-1).tolist() == causal.tolist()


def test_image_averages_many_tiles_and_draws_ttft_as_a_bar_of_parts() -> None:
    read = np.zeros((1, 1, 192, 192), dtype=bool)
    read[:, :, :, 0] = True
    found = TilesRead(read, 192 * 128)
    image = np.asarray(drawing.to_image(found, "title", TIMINGS))
    column = image[16 + 36 + 95, 16 + 72].astype(int)  # two tiles wide, one of them computed
    halfway = (np.array(drawing._READ) + np.array(drawing._CAUSAL)) / 2
    assert np.abs(column - halfway).max() <= 1
    below = 16 + 36 + 96 + 6 + 6
    bar = image[below + 18 + 9, 16:-16]
    shares = [(bar == colour).all(-1).mean() for colour in drawing._PARTS[:3]]
    assert shares == pytest.approx([0.25, 0.75, 0], abs=0.01)
    assert drawing.to_image(found, "title", None).height < len(image)


def test_large_tile_map_is_scaled_to_the_terminal() -> None:
    found = TilesRead(np.tri(100, dtype=bool)[None, None], 100 * 128)
    console = Console(width=80, file=io.StringIO(), record=True)
    drawing.to_terminal(console, found, "title")
    lines = console.export_text().splitlines()[1:33]
    assert [len(line.rstrip()) for line in lines] == list(range(2, 66, 2))
    assert set("".join(lines)) == {"█", " "}


def test_picture_asks_a_server_with_the_same_options(config: Path, house: House) -> None:
    done = picture(config, *OPTIONS, "--ask", "--address", house.address)
    assert done.exit_code == 0, done.output
    assert "Time to first token" in done.stdout
    (job,) = house.group.jobs
    assert list(job.token_ids[::4]) == IDS
    assert (job.method.name, dict(job.method.options)["window"]) == ("streaming", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "magic"], "unknown attention method 'magic'"),
        (["--option", "wings=2"], "no option 'wings'"),
        (["--png", "/nowhere/at/all.png"], "/nowhere/at/all.png cannot be written"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--ask", "--address", "127.0.0.1:1"], "is a server running at 127.0.0.1:1?"),
    ],
)
def test_picture_command_prints_errors_in_one_line(config: Path, arguments: list[str], says: str) -> None:
    done = picture(config, *arguments)
    assert done.exit_code == 1
    assert says in done.stderr
    assert "Traceback" not in done.output


def test_error_names_the_extra_that_installs_pillow(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafront.service.cli.picture.find_spec", lambda _name: None)
    done = picture(config)
    assert done.exit_code == 1
    assert "deltafront[picture]" in done.stderr
