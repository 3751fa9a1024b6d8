"""`deltafront serve`, the service on this machine, and `verify`, which checks a model for pods."""

import functools
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from deltafront.service.cli.automatic import NO_WISHES, Wishes, choose
from deltafront.service.cli.size_command import HUB
from deltafront.service.cli.terminal import err, fail
from deltafront.service.config import RECOMPUTED, ConfigError, ServiceConfig, load, parse
from deltafront.service.local.log_file import default_log, output_to
from deltafront.service.local.machine import this_machine
from deltafront.service.local.readiness import StartError
from deltafront.service.wiring import checked_config, local_model
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.directory.digest import COMPLETE, mark_complete
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import model_directory
from deltafront.workers.settings import ModelSpec

Device = Literal["cpu", "cuda"]


def serve_command(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A YAML configuration; see deploy/config.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A directory, .gguf file, hub id or embedded model's name.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A PEFT LoRA directory for --model.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer (model.max_position_embeddings).")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Without --config: number of GPUs to use (default: all); 0: CPUs.")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Without --config: cuda or cpu (default: cuda if there is a GPU).")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Without --config: number of GPUs that share the layers in prefill.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Without --config: number of GPUs that share each layer in decode.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of OpenAI's API; overrides door.http_port.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of gRPC; overrides door.grpc_port.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of metrics; overrides door.metrics_port.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Without --config: the file that evaluate or calibrate wrote.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Log file of Ray, Serve and HAProxy; each start replaces it.")
    ] = None,
) -> None:
    """Start Ray and the service on this machine; Ctrl-C stops both."""
    try:
        wishes = Wishes(
            gpus=gpus,
            device=device,
            stages=stages,
            tensor_parallel=tensor_parallel,
            max_model_len=max_model_len,
        )
        read = read_settings(config, model, adapter, wishes, profile)
        ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        settings = local_model(with_keys(read, "door", ports))
        signal.signal(signal.SIGTERM, _interrupt)
        _serve(settings, log or default_log(settings.door.grpc_port))
    except KeyboardInterrupt:
        err.print("Stopped.")
    except (ConfigError, ModelError, FileNotFoundError) as error:
        fail(str(error))


def read_settings(
    config: Path | None,
    model: str | None,
    adapter: str | None,
    wishes: Wishes = NO_WISHES,
    profile: Path | None = None,
) -> ServiceConfig:
    """Read the configuration file; without one, choose a configuration for this machine and print it.

    Raises:
        ConfigError: The file is wrong, flags contradict each other, or the machine is not sufficient.
        ModelError: The model cannot be used.
    """
    if config is None:
        if model is None:
            raise ConfigError("give --config FILE or --model NAME (deploy/config/demo.yaml is an example)")
        return _chosen(model, adapter, wishes, profile)
    if profile is not None:
        raise ConfigError("--profile: with --config set model.profile")
    if replace(wishes, max_model_len=None) != NO_WISHES:
        raise ConfigError("--gpus, --device, --stages, --tensor-parallel: with --config set its keys")
    if model is None and adapter is not None:
        raise ConfigError("--adapter: goes with --model; of the file's model it is model.adapter")
    settings = load(config)
    settings = settings if model is None else _with_other_model(settings, model, adapter)
    return with_keys(settings, "model", {"max_position_embeddings": wishes.max_model_len})


def _chosen(model: str, adapter: str | None, wishes: Wishes, profile: Path | None) -> ServiceConfig:
    path, measured = HUB.get(model, model), None if profile is None else Profile.read(profile).measured
    blocks = RECOMPUTED if measured is None else measured.recompute_blocks
    choice = choose(checked_config(model_directory(path)), path, this_machine(), wishes, blocks)
    for name, line in zip(("machine", "context"), choice.lines, strict=True):
        err.print(f"{name:9} {line}", soft_wrap=True, markup=False, highlight=False)
    given = {"adapter": adapter, "profile": None if profile is None else str(profile.resolve())}
    return parse(choice.content | {"model": choice.content["model"] | given}, "--model")


def _with_other_model(settings: ServiceConfig, model: str, adapter: str | None) -> ServiceConfig:
    """Replace the model of a configuration file, and drop the settings that belong to the old model."""
    old = settings.model
    spec = ModelSpec(path=model, adapter=adapter, dtype=old.dtype, quantisation=old.quantisation)
    decode = replace(settings.decode, page_selection="full", delta_layers=())
    warm_up = tuple(dict.fromkeys(name for name, _ in settings.prefill.warmed_up))
    prefill = replace(settings.prefill, method_options={}, warm_up=warm_up)
    door = replace(settings.door, model_name="", display_name="", default_method="", default_options={})
    changes = {"model": spec, "prefill": prefill, "decode": decode, "door": door}
    return settings.model_copy(update=changes)


def with_keys(settings: ServiceConfig, section: str, keys: Mapping[str, int | None]) -> ServiceConfig:
    """Replace a section's keys. A value of None keeps the key."""
    given = {key: value for key, value in keys.items() if value is not None}
    if not given:
        return settings
    content = settings.model_dump()
    return parse({**content, section: {**content[section], **given}}, "serve")


def describe_attention(settings: ServiceConfig) -> str:
    """Describe, in one line, the attention of requests that name no method."""
    default, blocks = settings.default_attention, settings.recompute_blocks
    options = "".join(f" {key}={value:g}" for key, value in default.options.items())
    again = "" if default.method == "dense" else f", {blocks} blocks recomputed"
    chosen = f"{default.method}{options}{again}"
    if not default.measured:
        return f"{chosen}; no sparse method was measured on this model: deltafront evaluate does it"
    profile = settings.model.profile
    measured = None if profile is None else Profile.read(Path(profile)).measured
    if measured is None or (measured.method, measured.options) != (default.method, default.options):
        return chosen
    return f"{chosen}; measured: {measured.verdict}"


def _serve(settings: ServiceConfig, log: Path) -> None:
    """Serve until KeyboardInterrupt. Fails if the service ends by itself."""
    from deltafront.service.listening import joined, reachable
    from deltafront.service.local.local_ray import prepare, running
    from deltafront.service.local.ports import describe_exposure

    prepare(settings)  # a failed check must not replace the log of a running service
    door = settings.door
    host, metrics_host = reachable(door.host), reachable(door.metrics_at)
    err.print(f"Starting Ray and Deltafront; their log is {log}", soft_wrap=True, highlight=False)
    try:
        with output_to(log) as console, running(settings, terminal=console, log=log) as processes:
            say = functools.partial(console.print, soft_wrap=True, markup=False, highlight=False)
            say(f"model     {door.model_name}")
            say(f"attention {describe_attention(settings)}")
            say(f"gRPC      {joined(host, door.grpc_port)}")
            say(f"OpenAI    http://{joined(host, door.http_port)}/v1")
            say(f"metrics   http://{joined(metrics_host, door.metrics_port)}/metrics")
            say(f"open      {describe_exposure(door)}")
            say("Ready. Ctrl-C stops.")
            failure = processes.wait_for_failure()
            say(f"deltafront: {failure}, so the service has stopped: start it again; {log} says more")
            processes.said()
            raise typer.Exit(1)
    except StartError as error:
        fail(f"the service did not start: {error}; {log} says more")


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def verify_command(directory: Annotated[Path, typer.Argument(help="A model's directory.")]) -> None:
    """Compare a model's files with their digests and mark it complete (for the model's Kubernetes Job)."""
    try:
        checked_config(directory)
        count = mark_complete(directory)
    except (ModelError, OSError) as error:
        fail(str(error))
    err.print(f"{count} files of {directory} match their digests; {COMPLETE} is written", soft_wrap=True)
