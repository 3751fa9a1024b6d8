"""The commands of `deltafront`.

Only results go to standard output. An error is one line that says what to do.
"""

import dataclasses
import importlib
import importlib.util
from typing import Annotated, Any

import typer
from rich.console import Console

from deltafront import __version__
from deltafront.service.cli import terminal
from deltafront.service.cli.chat import chat_command
from deltafront.service.cli.terminal import (
    ADDRESS,
    Address,
    Bearer,
    Chat,
    Keep,
    Method,
    Options,
    Recompute,
    Salt,
    Tls,
    err,
    fail,
)
from deltafront.service.client import DeltafrontClient, PrefillFinished, Progress
from deltafront.service.request.answers import GenerateFinished

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
sessions = typer.Typer(help="Sessions: prompts that a server keeps.", no_args_is_help=True)

File = Annotated[str, typer.Argument(help="A text file, or - for standard input.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds after which the server ends the request.")]
ShowTimings = Annotated[bool, typer.Option("--timings", help="Show where the time to first token went.")]
SpecialTokens = Annotated[
    str, typer.Option(help="Control tokens spelled in raw text: text keeps them as text, parse as tokens.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of text.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"deltafront {__version__}")
        raise typer.Exit


@app.callback()
def deltafront(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A distributed long-context prefill service."""


def _needs_server(context: typer.Context) -> None:
    """Runs beside a server."""
    fail(f"deltafront {context.info_name}: needs the server's packages: pip install 'deltafront[server]'")


def _add_server_command(name: str, module: str) -> None:
    """Add a command that needs the server's packages. A client-only installation shows just its name."""
    if importlib.util.find_spec("ray") is None:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, context_settings=anything)(_needs_server)
    else:
        command = getattr(importlib.import_module(f"{__package__}.{module}"), f"{name}_command")
        app.command(name)(command)


_add_server_command("serve", "serve")


@app.command()
def prefill(
    *,
    file: File,
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
    chat: Chat = None,
    method: Method = "",
    option: Options = [],  # noqa: B006  typer copies it
    keep: Annotated[float | None, typer.Option(help="Seconds to keep the session.")] = None,
    special_tokens: SpecialTokens = "text",
    cache_salt: Salt = "",
    timeout: Timeout = None,
    timings: ShowTimings = False,
    json: Json = False,
) -> None:
    """Prefill a document and keep it as a session; prints the session's id."""
    text = terminal.read_text(file)
    with terminal.connect(address, token, tls) as client, terminal.ProgressBar(err) as bar:
        result: PrefillFinished | None = None
        for event in client.prefill(
            _prompt(text, _uses_messages(client, chat)),
            method=method,
            options=terminal.read_options(option),
            session_ttl_s=keep,
            timeout_s=timeout,
            special_tokens=special_tokens,
            cache_salt=cache_salt,
        ):
            if isinstance(event, Progress):
                bar.show(event)
            else:
                result = event
        if result is None:
            fail("the stream ended without a result")
    print(terminal.as_json(result) if json else result.session.session_id)
    if timings:
        terminal.show_timings(err, result.timings)
    if timings or result.usage.cached_tokens:
        err.print(terminal.describe_usage(result.usage, asked_session=False), highlight=False)


@app.command()
def generate(
    *,
    file: Annotated[str | None, typer.Argument(help="A text file, or - for standard input.")] = None,
    question: Annotated[str, typer.Option("--question", "-q", help="The text after the document.")] = "",
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="Id of a session to continue, instead of FILE.")
    ] = None,
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
    chat: Chat = None,
    method: Method = "",
    option: Options = [],  # noqa: B006
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option()] = 0,
    stop: Annotated[list[str], typer.Option(help="End the answer before this text.")] = [],  # noqa: B006
    page_selection: Annotated[str, typer.Option(help="Page selection in decode: full or delta.")] = "",
    recompute: Recompute = None,
    keep: Keep = None,
    special_tokens: SpecialTokens = "text",
    cache_salt: Salt = "",
    timeout: Timeout = None,
    timings: ShowTimings = False,
    json: Json = False,
) -> None:
    """Generate an answer to a prompt, or to a question about a session."""
    if (file is None) == (session is None):
        fail("give either FILE or --session")
    if session is not None and not question:
        fail("a session needs a --question")
    document = None if file is None else terminal.read_text(file)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    request: dict[str, Any] = sampling | {"seed": seed, "stop": stop, "session_id": session}
    request |= {"method": method, "options": terminal.read_options(option), "page_selection": page_selection}
    request |= {"recompute_blocks": recompute, "session_ttl_s": keep, "special_tokens": special_tokens}
    request |= {"timeout_s": timeout, "cache_salt": cache_salt}
    with terminal.connect(address, token, tls) as client:
        messages = _uses_messages(client, chat)
        request["prompt"] = None if document is None else _prompt(document, messages)
        request["append"] = _prompt(question, messages) if question else None
        text, finish = terminal.stream_answer(client, request, quiet=json)
    if json:
        print(terminal.as_json(dataclasses.replace(finish, text=text)))
    else:
        _show_finish(finish, asked_session=session is not None, timings=timings)


def _show_finish(finish: GenerateFinished, *, asked_session: bool, timings: bool) -> None:
    if finish.session is not None:
        err.print(f"session {finish.session.session_id} holds {finish.session.tokens} tokens")
    if timings:
        terminal.show_timings(err, finish.timings)
    if timings or (not asked_session and finish.usage.cached_tokens):
        again = f"; {finish.recomputed_tokens} recomputed" if finish.recomputed_tokens else ""
        err.print(terminal.describe_usage(finish.usage, asked_session) + again, highlight=False)


@sessions.command()
def release(session_id: str, address: Address = ADDRESS, token: Bearer = "", tls: Tls = False) -> None:
    """End a session and free its pages."""
    with terminal.connect(address, token, tls) as client:
        client.release(session_id)


@app.command()
def info(address: Address = ADDRESS, token: Bearer = "", tls: Tls = False, json: Json = False) -> None:
    """Show the model, its limits, methods and capacity."""
    with terminal.connect(address, token, tls) as client:
        server = client.info()
    if json:
        print(terminal.as_json(server))
    else:
        terminal.show_info(Console(), server)


def _uses_messages(client: DeltafrontClient, chat: bool | None) -> bool:
    return client.info().chat_template if chat is None else chat


def _prompt(text: str, messages: bool) -> Any:
    return [{"role": "user", "content": text}] if messages else text


app.add_typer(sessions, name="sessions")
_add_server_command("calibrate", "calibrate")
app.command("chat")(chat_command)
_add_server_command("drain", "drain")
_add_server_command("evaluate", "evaluation.command")
_add_server_command("picture", "picture")
_add_server_command("size", "size_command")
_add_server_command("top", "top.command")
_add_server_command("verify", "serve")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
