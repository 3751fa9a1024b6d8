"""`deltafront`: serve, prefill, generate, chat, sessions release, info, calibrate, picture, size, drain.

Answers go to standard output, everything else to standard error. An error is one line, with what to do.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ... import __version__
from ...workers.model.directory.json_files import ModelError
from ...workers.settings import ModelSpec
from ..client import DeltafrontClient, PrefillFinished, Progress
from ..config import ConfigError, ServiceConfig, load, parse
from ..local.log_file import default_log, output_to
from ..local.start_errors import StartError
from ..wiring import local_model
from .calibrate import calibrate_command
from .chat import chat_command
from .drain import drain_command
from .picture import picture_command
from .size import size_command
from .terminal import (
    ADDRESS,
    Address,
    Bearer,
    Chat,
    Method,
    Options,
    Recompute,
    Salt,
    Tls,
    as_json,
    calling,
    err,
    fail,
    read_options,
    read_text,
    reading_bar,
    show_info,
    show_timings,
    stream_answer,
    told_usage,
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
sessions = typer.Typer(help="Sessions: prompts that a server keeps.", no_args_is_help=True)
app.add_typer(sessions, name="sessions")
app.command("calibrate")(calibrate_command)
app.command("chat")(chat_command)
app.command("drain")(drain_command)
app.command("picture")(picture_command)
app.command("size")(size_command)

Timeout = Annotated[float | None, typer.Option(help="Seconds until the server gives up.")]
ShowTimings = Annotated[bool, typer.Option("--timings", help="Show where the time to first token went.")]
SpecialTokens = Annotated[
    str, typer.Option(help="What control tokens spelled in raw text are: text, or parse for these tokens.")
]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON instead of text.")]


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


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML; see deploy/config.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory, .gguf file, hub id or embedded name.")] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT LoRA directory for --model.")] = None,
    port: Annotated[int | None, typer.Option(help="Of OpenAI's API, in place of door.http_port.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="In place of door.grpc_port.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="In place of door.metrics_port.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="Where Ray, Serve and HAProxy write to; replaced by each start.")
    ] = None,
) -> None:
    """Start Ray and the service on this machine; Ctrl-C stops both."""
    try:
        ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        settings = local_model(_with_ports(_settings(config, model, adapter), ports))
        signal.signal(signal.SIGTERM, _interrupt)
        _serve(settings, log or default_log(settings.door.grpc_port))
    except KeyboardInterrupt:
        err.print("Stopped.")
    except (ConfigError, ModelError, FileNotFoundError) as error:
        fail(str(error))


@app.command()
def prefill(
    file: Annotated[str, typer.Argument(help="Text file, or - for standard input.")],
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
    """Read a document and keep it; prints the session's id."""
    text = read_text(file)
    with calling(address, token, tls) as client, reading_bar(err) as bar:
        result: PrefillFinished | None = None
        for event in client.prefill(
            _said(text, _chats(client, chat)),
            method=method,
            options=read_options(option),
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
        bar.stop()
        print(as_json(result) if json else result.session.session_id)
        if timings:
            show_timings(err, result.timings)
        if timings or result.usage.cached_tokens:
            err.print(told_usage(result.usage, asked_session=False), highlight=False)


@app.command()
def generate(
    file: Annotated[str | None, typer.Argument(help="Text file, or - for standard input.")] = None,
    question: Annotated[str, typer.Option("--question", "-q", help="Follows the document.")] = "",
    session: Annotated[str | None, typer.Option("--session", "-s", help="Ask a session instead.")] = None,
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
    chat: Chat = None,
    method: Method = "",
    option: Options = [],  # noqa: B006
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int, typer.Option()] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    stop: Annotated[list[str], typer.Option(help="The answer ends before it.")] = [],  # noqa: B006
    page_selection: Annotated[str, typer.Option(help="Decode page selection: full or delta.")] = "",
    recompute: Recompute = None,
    keep: Annotated[float | None, typer.Option(help="Seconds to keep the document as a session.")] = None,
    special_tokens: SpecialTokens = "text",
    cache_salt: Salt = "",
    timeout: Timeout = None,
    timings: ShowTimings = False,
    json: Json = False,
) -> None:
    """Answer a document, or a question about a session."""
    if (file is None) == (session is None):
        fail("give either FILE or --session")
    if session is not None and not question:
        fail("a session needs a --question")
    document = None if file is None else read_text(file)
    request = {
        "session_id": session,
        "method": method,
        "options": read_options(option),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "page_selection": page_selection,
        "recompute_blocks": recompute,
        "session_ttl_s": keep,
        "special_tokens": special_tokens,
        "timeout_s": timeout,
        "cache_salt": cache_salt,
    }
    with calling(address, token, tls) as client:
        chats = _chats(client, chat)
        request["prompt"] = None if document is None else _said(document, chats)
        request["append"] = _said(question, chats) if question else None
        text, finish = stream_answer(client, request, quiet=json)
    if json:
        print(as_json(dataclasses.replace(finish, text=text)))
        return
    if finish.session is not None:
        err.print(f"session {finish.session.session_id} holds {finish.session.tokens} tokens")
    usage = finish.usage
    if timings:
        show_timings(err, finish.timings)
    if timings or (session is None and usage.cached_tokens):
        again = f"; {finish.recomputed_tokens} computed again" if finish.recomputed_tokens else ""
        err.print(told_usage(usage, asked_session=session is not None) + again, highlight=False)


@sessions.command()
def release(session_id: str, address: Address = ADDRESS, token: Bearer = "", tls: Tls = False) -> None:
    """Free a session's pages now."""
    with calling(address, token, tls) as client:
        client.release(session_id)


@app.command()
def info(address: Address = ADDRESS, token: Bearer = "", tls: Tls = False, json: Json = False) -> None:
    """The model, its limits, methods and capacity."""
    with calling(address, token, tls) as client:
        found = client.info()
    if json:
        print(as_json(found))
    else:
        show_info(Console(), found)


def main() -> None:
    app()


# --- helpers ---------------------------------------------------------------------------------------------


def _settings(config: Path | None, model: str | None, adapter: str | None) -> ServiceConfig:
    if config is None:
        if model is None:
            raise ConfigError("give --config FILE or --model NAME (deploy/config/demo.yaml is an example)")
        return parse(
            {"model": {"path": model, "adapter": adapter}, "decode": {"page_selection": "full"}}, "--model"
        )
    if model is None and adapter is not None:
        raise ConfigError("--adapter: goes with --model; of the file's model it is model.adapter")
    settings = load(config)
    if model is None:
        return settings
    # Adapter, rope, profile, name, Δ-layers and options of methods belong to the file's model.
    of_file = settings.model
    spec = ModelSpec(path=model, adapter=adapter, dtype=of_file.dtype, quantisation=of_file.quantisation)
    decode = dataclasses.replace(settings.decode, page_selection="full", delta_layers=())
    warm_up = tuple(dict.fromkeys(name for name, _ in settings.prefill.warmed_up))
    prefill = dataclasses.replace(settings.prefill, method_options={}, warm_up=warm_up)
    door = dataclasses.replace(settings.door, model_name="", display_name="")
    changes = {"model": spec, "prefill": prefill, "decode": decode, "door": door}
    return settings.model_copy(update=changes)


def _with_ports(settings: ServiceConfig, ports: Mapping[str, int | None]) -> ServiceConfig:
    """ports: by key of the door's; None: as configured."""
    given = {key: port for key, port in ports.items() if port is not None}
    if not given:
        return settings
    return parse({**settings.model_dump(), "door": {**settings.model_dump()["door"], **given}}, "serve")


def _chats(client: DeltafrontClient, asked: bool | None) -> bool:
    """Whether text is sent as messages: as it was asked for, or where the model has a template for them."""
    return client.info().chat_template if asked is None else asked


def _serve(settings: ServiceConfig, log: Path) -> None:
    """Until somebody stops it, which raises KeyboardInterrupt. Ends the command if the service ends by
    itself."""
    from ..listening import joined, reachable
    from ..local.local_ray import prepare, running
    from ..local.ports import describe_exposure

    prepare(settings)  # before the log of a service that runs is replaced
    door = settings.door
    host, scraped = reachable(door.host), reachable(door.metrics_at)
    err.print(f"Starting Ray and Deltafront; their log is {log}", soft_wrap=True, highlight=False)
    try:
        with output_to(log) as console, running(settings) as processes:
            say = functools.partial(console.print, soft_wrap=True, markup=False, highlight=False)
            say(f"model     {door.model_name}")
            say(f"gRPC      {joined(host, door.grpc_port)}")
            say(f"OpenAI    http://{joined(host, door.http_port)}/v1")
            say(f"metrics   http://{joined(scraped, door.metrics_port)}/metrics")
            say(f"open      {describe_exposure(door)}")
            say("Ready. Ctrl-C stops.")
            failure = processes.wait_for_failure()
    except StartError as error:
        fail(f"the service did not start: {error}; {log} says more")
    fail(f"{failure}, so the service has stopped: start it again; {log} says more")


def _said(text: str, chat: bool) -> Any:
    return [{"role": "user", "content": text}] if chat else text


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
