"""Input and output of the commands."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from deltafront.service import errors
from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import GenerateFinished, ProfileInfo, ServerInfo, Timings
from deltafront.workers.messages.events import Progress, Token, Usage

_SIGNIFICANT_S = 0.0005
_STAGES_PER_TABLE = 5
"""The most stages that fit into 80 columns."""

# Options that several commands take.
Address = Annotated[str, typer.Option(envvar="DELTAFRONT_ADDRESS", help="The server's host:port.")]
Bearer = Annotated[str, typer.Option(envvar="DELTAFRONT_TOKEN", help="Bearer token.", show_default=False)]
Tls = Annotated[bool, typer.Option("--tls", help="Use TLS.")]
Method = Annotated[str, typer.Option(help="Attention method; see `deltafront info`.")]
Options = Annotated[list[str], typer.Option("--option", help="NAME=VALUE, an option of the method.")]
Salt = Annotated[
    str, typer.Option("--cache-salt", help="Share cached blocks only with requests with the same salt.")
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Use the model's chat template (default, if it has one), or send the text unchanged.",
        show_default=False,
    ),
]
Keep = Annotated[float | None, typer.Option(help="Seconds to keep the document as a session.")]
Recompute = Annotated[
    int | None,
    typer.Option(help="Number of 128-token blocks to recompute densely for the question."),
]
ADDRESS = "127.0.0.1:9000"

err = Console(stderr=True)


@contextlib.contextmanager
def connect(address: str, token: str, tls: bool) -> Iterator[DeltafrontClient]:
    """Yield a client. Its errors end the command."""
    try:
        with DeltafrontClient(address, token or None, tls=tls) as client:
            yield client
    except DeltafrontError as error:
        fail(with_advice(error, address))
    except KeyboardInterrupt:
        fail("interrupted; the request was cancelled")


def read_text(file: str) -> str:
    """Read a file, or standard input for `-`, as UTF-8 in any locale."""
    try:
        if file != "-":
            return Path(file).read_text(encoding="utf-8")
        return io.StringIO(sys.stdin.buffer.read().decode(), newline=None).read()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")


def read_options(pairs: list[str]) -> dict[str, float]:
    options = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            options[name] = float(value)
        except ValueError:
            fail(f"--option {pair}: must be NAME=NUMBER")
    return options


def fail(message: str) -> NoReturn:
    show_error(message)
    raise typer.Exit(1)


def show_error(message: str) -> None:
    err.print(f"deltafront: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


class ProgressBar:
    """A prefill progress bar that appears with the first `Progress` event, in a terminal only."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("prefill"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"))
        shown = console.is_terminal  # without a terminal rich would print an empty line
        self._bar = Bar(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not shown)
        self._task: Any = None
        self._stopped = False

    def show(self, event: Progress) -> None:
        if self._stopped:
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("prefill", total=event.tokens_total)
        self._bar.update(self._task, completed=event.tokens_done, total=event.tokens_total)

    def stop(self) -> None:
        if self._task is not None and not self._stopped:  # rich ends a line at each stop
            self._bar.stop()
        self._stopped = True

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


def stream_answer(
    client: DeltafrontClient, request: dict[str, Any], quiet: bool
) -> tuple[str, GenerateFinished]:
    """Receive an answer, and print it unless quiet. Returns the text and the last event."""
    text = ""
    with ProgressBar(err) as bar:
        for event in client.generate(**request):
            if isinstance(event, Progress):
                bar.show(event)
                continue
            bar.stop()
            text += event.text
            if not quiet:
                sys.stdout.write(event.text)
                sys.stdout.flush()
            if isinstance(event, GenerateFinished):
                if not quiet:
                    print()
                return text, event
            assert isinstance(event, Token)
    fail("the stream ended without a finish event")


def significant_parts(timings: Timings) -> list[tuple[str, float]]:
    return [(name, seconds) for name, seconds in timings.parts.items() if seconds >= _SIGNIFICANT_S]


def show_timings(console: Console, timings: Timings) -> None:
    table = Table("part", "seconds", "share", title="Time to first token")
    for name, seconds in significant_parts(timings):
        table.add_row(name, f"{seconds:.3f}", f"{seconds / timings.ttft_seconds:.1%}")
    table.add_row("[bold]sum", f"[bold]{timings.ttft_seconds:.3f}", "100%")
    console.print(table)
    for begin in range(0, len(timings.stages), _STAGES_PER_TABLE):
        stages = timings.stages[begin : begin + _STAGES_PER_TABLE]
        table = Table(title="Seconds by stage (stages overlap)")
        table.add_column("phase", no_wrap=True)
        for number in range(begin, begin + len(stages)):
            table.add_column(f"stage {number}", justify="right", no_wrap=True)
        for name in dict.fromkeys(name for stage in stages for name in stage):
            table.add_row(name, *(f"{stage.get(name, 0.0):.3f}" for stage in stages))
        console.print(table)


def describe_usage(usage: Usage, asked_session: bool) -> str:
    """Describe how many prompt tokens were cached and, if no session was requested, their possible
    sources."""
    counts = f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached"
    if asked_session or not usage.cached_tokens:
        return counts
    return (
        f"{counts} from earlier prompts: yours or, if the server has no bearer tokens, any caller's "
        "(--cache-salt limits this to the same salt)"
    )


def show_info(console: Console, info: ServerInfo) -> None:
    name = escape(info.display_name or info.model)
    table = Table(title=f"{name} (Deltafront {info.version})", show_header=False)
    table.add_row("model", escape(info.model))
    table.add_row("positions", f"{info.max_positions}")
    table.add_row("vocabulary", f"{info.vocabulary}")
    table.add_row("prefill", f"{info.prefill_groups} group(s) of {info.prefill_stages} stages")
    table.add_row("chunk", f"{info.chunk_tokens} tokens")
    table.add_row("prefill pages", f"{info.prefill_pages_free} of {info.prefill_pages_total} free")
    table.add_row("decode", f"{info.decode_workers} worker(s)")
    table.add_row("decode pages", f"{info.decode_pages_free} of {info.decode_pages_total} free")
    table.add_row("page selection", _page_selection(info))
    table.add_row("recompute", f"{info.recompute_blocks} blocks of 128 tokens")
    names = ("temperature", "top_p", "top_k", "max_tokens") if info.default_sampling else ()
    table.add_row("sampling", ", ".join(f"{name}={getattr(info.default_sampling, name)}" for name in names))
    table.add_row("metrics", f"http://{info.metrics_address}/metrics")
    console.print(table)
    methods = Table("attention method", "options", "source")
    for method in info.methods:
        default, plus, correction = info.default_method.partition("+")
        mark = f" (default{plus and f': +{correction}'})" if method.name == default else ""
        options = ", ".join(f"{name}={value:g}" for name, value in method.defaults.items())
        methods.add_row(method.name + mark, options, method.source)
    console.print(methods)
    if info.profile is not None:
        _show_profile(console, info.profile)
    if info.measured is not None:
        console.print(escape(f"Measured: {info.measured.verdict}"))


def _page_selection(info: ServerInfo) -> str:
    if not info.delta_layers:
        return "full: no Δ-layers"
    layers = ", ".join(str(layer) for layer in info.delta_layers)
    dense = ", ".join(str(layer) for layer in info.full_layers) or "none"
    return f"Δ-layers {layers}; dense {dense}; {info.page_budget} pages, including the last {info.recency}"


def _show_profile(console: Console, profile: ProfileInfo) -> None:
    table = Table("method", "options", "density", "tokens", title=f"Profile of {escape(profile.model)}")
    for level in profile.levels:
        options = ", ".join(f"{name}={value:g}" for name, value in level.options.items())
        table.add_row(level.method, options, f"{level.density:g}", f"{level.tokens}")
    console.print(table)
    if profile.figures:
        table = Table("figures", "", title="Results on held-out texts")
        for name, value in _figures(json.loads(profile.figures)):
            table.add_row(escape(name), escape(value))
        console.print(table)


def _figures(figures: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            yield f"{group}{name}", _format(value)
        elif any(isinstance(item, Mapping) for item in value.values()):
            yield from _figures(value, f"{group}{name}: ")
        else:
            yield f"{group}{name}", ", ".join(f"{key} {_format(item)}" for key, item in value.items())


def _format(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def as_json(result: Any) -> str:
    return json.dumps(asdict(result), ensure_ascii=False)


def with_advice(error: DeltafrontError, address: str) -> str:
    advice = {
        errors.Unavailable: f"is a server running at {address}? `deltafront serve` starts one",
        errors.Unauthenticated: "give --token or set DELTAFRONT_TOKEN",
        errors.NotFound: "`deltafront prefill FILE` makes a new session",
        errors.DeadlineExceeded: "allow more time with --timeout",
        errors.InvalidArgument: "`deltafront info` shows what the server accepts",
    }.get(type(error), "")
    if isinstance(error, errors.InvalidArgument) and error.field in ("address", "tls"):
        advice = ""
    elif isinstance(error, errors.InvalidArgument) and error.field.endswith(".messages"):
        advice = "`deltafront generate --raw` sends text without the model's chat template"
    elif isinstance(error, errors.Overloaded) and error.retry_after_s is not None:
        advice = f"try again in {error.retry_after_s:.0f} s"
    return f"{error.message or error.code}" + (f" ({advice})" if advice else "")
