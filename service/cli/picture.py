"""`deltafront picture`: draws the tiles computed for a prompt, and the parts of its time to first token.

This process prefills the prompt, with the configuration's model and chunks. Unlike a server it computes all
rows of the last layer. torch is imported when the command runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deltafront.kernels.methods import MethodError, MethodSpec
from deltafront.service.cli import terminal
from deltafront.service.cli.terminal import ADDRESS, Address, Bearer, Method, Options, Tls, err
from deltafront.service.config import ConfigError, ServiceConfig, load
from deltafront.service.request.answers import Timings
from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.service.wiring import local_model
from deltafront.workers.messages.events import Progress
from deltafront.workers.model.directory.model_files import ModelError

if TYPE_CHECKING:
    from deltafront.workers.calibration.tiles import TilesRead


def picture_command(
    *,
    file: Annotated[str, typer.Argument(help="A text file, or - for standard input.")],
    config: Annotated[
        Path, typer.Option("--config", "-c", help="A YAML configuration with model and chunks.")
    ],
    png: Annotated[Path | None, typer.Option(help="Write a PNG instead of drawing in the terminal.")] = None,
    method: Method = "",
    option: Options = [],  # noqa: B006
    tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of the file.")] = None,
    ask: Annotated[
        bool, typer.Option("--ask", help="Also send the prompt to a server, and draw its TTFT.")
    ] = False,
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
) -> None:
    """Draw the attention tiles computed for a prompt and, with --ask, the parts of its time to first
    token.
    """
    _require_pillow()
    options = terminal.read_options(option)
    text = terminal.read_text(file)
    try:
        settings = local_model(load(config))
        default = settings.default_attention
        options = options if method or options else dict(default.options)
        spec = settings.prefill.method(method or default.method, options)
        packed = TextTokenizer.load(Path(settings.model.path)).encode(text, add_bos=True)
        ids = memoryview(packed).cast("I").tolist()[:tokens]
        timings = None
        if ask:
            request = {"prompt": ids, "method": spec.name, "options": options, "max_tokens": 1}
            with terminal.connect(address, token, tls) as client:
                timings = terminal.stream_answer(client, request, quiet=True)[1].timings
        tiles = _read(settings, ids, spec)
    except (ConfigError, ModelError, MethodError, ValueError) as error:
        terminal.fail(str(error))
    _show(tiles, spec.name, timings, png)


def _require_pillow() -> None:
    if find_spec("PIL") is None:
        terminal.fail("pictures need the package pillow, which is not installed: deltafront[picture]")


def _read(settings: ServiceConfig, ids: list[int], spec: MethodSpec) -> TilesRead:
    from deltafront.workers.calibration.tiles import tiles_read

    with terminal.ProgressBar(err) as bar:

        def show(done: int) -> None:
            bar.show(Progress(tokens_done=done, tokens_total=len(ids)))

        chunk_tokens, device = settings.prefill.chunk_tokens, settings.prefill.device
        return tiles_read(settings.model, ids, spec, chunk_tokens, device=device, progress=show)


def _show(tiles: TilesRead, method: str, timings: Timings | None, png: Path | None) -> None:
    from deltafront.service.cli import drawing

    title = f"{method}: {float(tiles.density_LH.mean()):.1%} of the tiles of {tiles.tokens} tokens"
    if png is None:
        drawing.to_terminal(Console(), tiles, title)
        if timings is not None:
            terminal.show_timings(Console(), timings)
        return
    try:
        drawing.to_image(tiles, title, timings).save(png, "PNG")
    except OSError as error:
        terminal.fail(f"{png} cannot be written: {error.strerror}")
    print(png)
