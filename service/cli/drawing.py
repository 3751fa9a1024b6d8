"""Draws tiles and timings in the terminal or as an image.

Shape suffixes: L layers, H heads, N query blocks, M key blocks, C colours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

from deltafront.service.cli.terminal import significant_parts
from deltafront.service.request.answers import Timings

if TYPE_CHECKING:
    from deltafront.workers.calibration.tiles import TilesRead

_SHADES = "·░▒▓█"
_MAP_ROWS = 32

_MAP, _GAP, _MARGIN, _LINE, _LABEL = 96, 6, 16, 18, 72
"""Sizes in pixels: a map's longest side, the gap between maps, the margin, a line of text, the column of
layer names."""
_PAPER, _CAUSAL, _READ, _INK = (255, 255, 255), (222, 228, 236), (24, 71, 133), (40, 40, 40)
_PARTS = ((24, 71, 133), (217, 119, 6), (22, 128, 89), (190, 50, 50), (112, 72, 160), (90, 140, 190),
          (140, 140, 40), (200, 100, 150), (110, 110, 110), (60, 170, 170))  # fmt: skip


def to_terminal(console: Console, tiles: TilesRead, title: str) -> None:
    """Print the tile map averaged over heads, then one shaded cell per head."""
    console.print(title, highlight=False)
    mean_NM = tiles.read_LHNM.mean((0, 1), dtype=np.float32)
    read_NM, causal_NM = _shrink(mean_NM), _shrink(np.tri(len(mean_NM), dtype=np.float32))
    for row in zip(read_NM.tolist(), causal_NM.tolist(), strict=True):
        shares = [read / causal if causal else None for read, causal in zip(*row, strict=True)]
        console.print("".join(_shade(share) * 2 for share in shares), highlight=False)
    table = Table("layer", "tiles read", "heads")
    for layer, density_H in enumerate(tiles.density_LH.tolist()):
        mean = sum(density_H) / len(density_H)
        table.add_row(str(layer), f"{mean:.1%}", "".join(_shade(share) * 2 for share in density_H))
    console.print(table)


def _shrink(x_NM: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    side = min(len(x_NM), _MAP_ROWS)
    return np.asarray(Image.fromarray(x_NM).resize((side, side), Image.Resampling.BOX))


def _shade(share: float | None) -> str:
    if share is None:
        return " "
    return _SHADES[0] if share <= 0 else _SHADES[min(1 + int(share * (len(_SHADES) - 1)), len(_SHADES) - 1)]


def to_image(tiles: TilesRead, title: str, timings: Timings | None) -> Image.Image:
    """Draw a tile map for each head (column) and layer (row), and below them the parts of TTFT."""
    layers, heads, blocks, _ = tiles.read_LHNM.shape
    side = _MAP if blocks > _MAP else blocks * (_MAP // blocks)
    parts = [] if timings is None else significant_parts(timings)
    top = _MARGIN + 2 * _LINE
    below = top + layers * (side + _GAP) + _GAP
    width = max(2 * _MARGIN + _LABEL + heads * (side + _GAP), 640)
    image = Image.new("RGB", (width, below + (len(parts) + 4) * _LINE * bool(parts) + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(13)
    draw.text((_MARGIN, _MARGIN), title + "; a row a layer, a column a head", _INK)
    for layer, density_H in enumerate(tiles.density_LH.tolist()):
        y = top + layer * (side + _GAP)
        draw.text((_MARGIN, y), f"layer {layer}", _INK)
        draw.text((_MARGIN, y + _LINE), f"{sum(density_H) / heads:.1%}", _INK)
        for head in range(heads):
            image.paste(_map(tiles, layer, head, side), (_MARGIN + _LABEL + head * (side + _GAP), y))
    if timings is not None:
        _draw_timings(draw, timings, parts, (_MARGIN, below, width - _MARGIN))
    return image


def _map(tiles: TilesRead, layer: int, head: int, side: int) -> Image.Image:
    read_NM = tiles.read_LHNM[layer, head]
    blocks = len(read_NM)
    map_NMC = np.full((blocks, blocks, 3), _PAPER, dtype=np.uint8)
    map_NMC[np.tri(blocks, dtype=bool)] = _CAUSAL
    map_NMC[read_NM] = _READ
    method = Image.Resampling.BOX if side < blocks else Image.Resampling.NEAREST
    return Image.fromarray(map_NMC).resize((side, side), method)


def _draw_timings(
    draw: ImageDraw.ImageDraw, timings: Timings, parts: list[tuple[str, float]], box: tuple[int, int, int]
) -> None:
    """Draw a bar, and a line for each part. box: left, top, right."""
    left, top, right = box
    draw.text((left, top), f"time to first token: {timings.ttft_seconds:.3f} s", _INK)
    x, y = float(left), top + 3 * _LINE
    for number, (name, seconds) in enumerate(parts):
        colour, share = _PARTS[number % len(_PARTS)], seconds / timings.ttft_seconds
        end = x + share * (right - left)
        draw.rectangle((x, top + _LINE, end, top + 2 * _LINE), colour)
        line = y + number * _LINE
        draw.rectangle((left, line + 3, left + 10, line + 13), colour)
        draw.text((left + _LINE, line), f"{name}  {seconds:.3f} s  {share:.1%}", _INK)
        x = end
