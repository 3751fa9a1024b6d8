"""Makes a door's objects from the configuration, without Ray."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltafront import __version__
from deltafront.kernels.methods import PRESETS
from deltafront.service.config import ConfigError, ServiceConfig
from deltafront.service.door.auth import Authenticator, TokenFile
from deltafront.service.door.batches.routes import BatchOptions
from deltafront.service.door.batches.storage import Storage
from deltafront.service.door.tls import Certificates, Gate, TlsFiles
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.fleet.fleet_view import FleetView
from deltafront.service.fleet.worker_gauges import state_of
from deltafront.service.metrics import Metrics
from deltafront.service.request.answers import MeasuredInfo, MethodInfo, ProfileInfo, ProfileLevel, ServerInfo
from deltafront.service.request.callers import Callers, Quota
from deltafront.service.request.calls import SamplingParams
from deltafront.service.request.check import Limits, model_sampling
from deltafront.service.request.context import Resources
from deltafront.service.request.handler import CancelAtOtherDoors, RequestHandler, no_other_doors
from deltafront.service.request.rates import RateLimits
from deltafront.service.request.shadow import ShadowReads
from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.service.settings import DoorConfig
from deltafront.service.tracing import Tracing
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.messages.states import DecodeStats, WorkerStats
from deltafront.workers.model.adapter import AdapterFiles
from deltafront.workers.model.calibrated.profile import Measured, Profile, load_profile
from deltafront.workers.model.calibrated.runs import few_runs_note
from deltafront.workers.model.directory.config_file import lost_window_note, read_config
from deltafront.workers.model.directory.digest import checked_model, model_digest
from deltafront.workers.model.directory.headers import check_weights, quantisation_notes
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError, read_json_or_empty
from deltafront.workers.model.directory.store import adapter_directory, model_directory
from deltafront.workers.model.directory.tokenizer_files import check_chat_template
from deltafront.workers.model.grammars import Grammars
from deltafront.workers.settings import ModelSpec
from deltafront.workers.tracing import SpanSink, provider

log = logging.getLogger(__name__)


def local_model(settings: ServiceConfig) -> ServiceConfig:
    """Resolve model and adapter to local directories, with download or conversion, and check them and the
    configuration. Raises ModelError or ConfigError.
    """
    spec = settings.model
    adapter = None if spec.adapter is None else str(adapter_directory(spec.adapter))
    local = settings.with_model(path=str(model_directory(spec.path)), adapter=adapter)
    local = local.model_copy(update={"door": _named(settings.door, shown_name(spec))})
    check_start(local)
    return local


def shared_model(settings: ServiceConfig) -> ServiceConfig:
    """Check model and configuration, for workers on other nodes. Raises ModelError or ConfigError.

    The model keeps its configured name, so that each node resolves it, and gets its digest, so that all nodes
    find the same model.
    """
    local, spec = local_model(settings), settings.model
    return local.with_model(path=spec.path, adapter=spec.adapter, digest=model_digest(local.model))


def _named(door: DoorConfig, name: str) -> DoorConfig:
    if door.model_name:
        return replace(door, display_name=door.display_name or door.model_name)
    model_id = re.sub(r"[^A-Za-z0-9._:/+-]+", "-", name.replace(" + ", "+")).strip("-")
    return replace(door, model_name=model_id or "model", display_name=door.display_name or name)


def shown_name(spec: ModelSpec) -> str:
    """Return a model's name without the server's directories."""
    name = spec.path if not Path(spec.path).exists() else Path(spec.path).name
    return name if spec.adapter is None else f"{name} + {Path(spec.adapter).name}"


def request_handler(
    settings: ServiceConfig,
    fleet: Fleet,
    metrics: Metrics,
    *,
    metrics_address: str,
    door_id: str = "",
    cancel_at_other_doors: CancelAtOtherDoors = no_other_doors,
    gate: Gate | None = None,
    tracing: Tracing | None = None,
) -> RequestHandler:
    """Make the handler of a door's requests. door_id: this door's unique id. Raises ModelError,
    FileNotFoundError or ConfigError."""
    found, door = checked_model(settings.model), settings.door
    directory = Path(found.path)
    model, profile = read_config(directory, found.overrides), load_profile(found)
    tokenizer = _tokenizer(settings, directory)
    callers = Callers(
        door_id,
        lambda: (use for worker in fleet.view.workers.values() for use in worker.uses),
        fleet.poll_shared,
        door.max_requests,
        RateLimits(door.replicas),
    )
    resources = Resources(
        door=door_id,
        model=repr(settings.model),
        fleet=fleet,
        callers=callers,
        tokenizer=tokenizer,
        metrics=metrics,
        settings=door,
        vocabulary=model.vocab,
        positions=model.positions,
        eos_ids=model.eos_ids,
        tracing=tracing or Tracing(),
        grammars=Grammars(directory, model.vocab, model.eos_ids),
        shadow=ShadowReads(door_id, fleet, metrics, door.shadow, door.refresh_s),
        profile=profile,
    )
    resources.grammars.load_soon()
    if profile is not None and profile.measured is not None:
        metrics.measured(profile.measured.setting, profile.measured.kept)
    limits = _limits(settings, directory, model, profile, tokenizer.longest_token)
    about = _server_info(settings, model, profile, tokenizer.has_template, metrics_address)
    about = replace(about, default_sampling=SamplingParams(**vars(limits.default_sampling)))
    return RequestHandler(resources, limits, authenticator(door, gate), about, cancel_at_other_doors)


def _limits(
    settings: ServiceConfig, directory: Path, model: ModelConfig, profile: Profile | None, longest_token: int
) -> Limits:
    door, decode = settings.door, settings.decode
    return Limits(
        vocabulary=model.vocab,
        positions=model.positions,
        prefill=settings.prefill,
        profile=profile,
        default_method=settings.default_attention.method,
        default_options=settings.default_attention.options,
        default_ttl_s=door.default_session_ttl_s,
        max_ttl_s=decode.max_session_ttl_s,
        longest_token=longest_token,
        delta_layers=bool(decode.delta_layers),
        default_recompute_blocks=settings.recompute_blocks_of(model),
        default_sampling=_default_sampling(settings, directory, model.positions),
        recomputes=not model.state_layers,
    )


def _tokenizer(settings: ServiceConfig, directory: Path) -> TextTokenizer:
    """Load the tokenizer. Raises ConfigError if `door.reasoning` could never see where reasoning ends."""
    tokenizer = TextTokenizer.load(directory)
    if settings.door.reasoning == "think" and not tokenizer.spells("</think>"):
        raise ConfigError("door.reasoning = think: </think> is a special token of this model, without text")
    return tokenizer


def _default_sampling(settings: ServiceConfig, directory: Path, positions: int) -> Sampling:
    door, file = settings.door, directory / "generation_config.json"
    neutral = Sampling(max_tokens=min(door.default_max_tokens, positions))
    if door.sampling_defaults == "neutral":
        return neutral
    try:
        return model_sampling(read_json_or_empty(file), neutral)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}; door.sampling_defaults: neutral does without it") from None


def _server_info(
    settings: ServiceConfig,
    model: ModelConfig,
    profile: Profile | None,
    chat_template: bool,
    metrics_address: str,
) -> ServerInfo:
    door, prefill, decode = settings.door, settings.prefill, settings.decode
    return ServerInfo(
        version=__version__,
        model=door.model_name or settings.model.path,
        display_name=door.display_name or door.model_name or settings.model.path,
        chat_template=chat_template,
        max_positions=model.positions,
        vocabulary=model.vocab,
        default_method=settings.default_attention.method,
        methods=[
            MethodInfo(name, preset.source, {key: float(values[key]) for key in preset.options})
            for name, preset in PRESETS.items()
            if not preset.whole_prompt
            for values in [prefill.method(name).values]
        ],
        prefill_stages=prefill.stages,
        chunk_tokens=prefill.chunk_tokens,
        metrics_address=metrics_address,
        full_layers=list(decode.full_layers),
        delta_layers=list(decode.delta_layers),
        page_budget=decode.page_budget,
        recency=decode.recency,
        profile=None if profile is None else _profile(profile),
        recompute_blocks=settings.recompute_blocks_of(model),
        default_options=dict(settings.default_attention.options),
        measured=None if profile is None or profile.measured is None else _measured(profile.measured),
    )


def _profile(profile: Profile) -> ProfileInfo:
    levels = []
    for method in profile.prefill:
        options = {key: float(value) for key, value in method.options.items()}
        levels += [ProfileLevel(method.method, options, each.density, each.tokens) for each in method.levels]
    return ProfileInfo(profile.model.name, levels, json.dumps(profile.figures) if profile.figures else "")


def _measured(found: Measured) -> MeasuredInfo:
    told = found.model_dump(exclude={"method", "options", "recompute_blocks", "tokens", "texts"})
    return MeasuredInfo(setting=found.setting, tokens=list(found.tokens), **told)


def authenticator(door: DoorConfig, gate: Gate | None = None) -> Authenticator:
    """Make the authenticator of requests. Raises ConfigError."""
    gate = gate if door.tls_only else None
    if door.tokens_file is None:
        return Authenticator(None, gate)
    try:
        tokens = TokenFile(door.tokens_file, Quota(*door.token_limits))
    except (OSError, ValueError) as error:
        raise ConfigError(f"door.tokens_file: {error}") from None
    return Authenticator(tokens, gate)


def tls_files(door: DoorConfig) -> TlsFiles | None:
    """Check the TLS files; None without TLS. Raises ConfigError."""
    if door.tls_certificate is None or door.tls_key is None:
        return None
    files = TlsFiles(door.tls_certificate, door.tls_key, door.tls_client_ca)
    try:
        files.check()
    except (OSError, ValueError) as error:
        raise ConfigError(f"door.tls_certificate: {error}") from None
    return files


def batch_options(door: DoorConfig, door_id: str, count: Callable[[bool, int], None]) -> BatchOptions | None:
    """Return how a door serves batches; None if `door.batches` is empty. Raises ConfigError."""
    if not door.batches:
        return None
    try:
        storage = Storage(door.batches)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"door.batches = {door.batches!r}: {error}") from None
    return BatchOptions(storage, door.batch_store_bytes, door.batch_requests, door_id, count)


def span_sink(door: DoorConfig) -> SpanSink:
    return SpanSink(door.tracing, door.model_name)


def make_tracing(door: DoorConfig, door_id: str) -> Tracing:
    """Make the door's tracing. Raises ConfigError if OpenTelemetry is not installed."""
    try:
        return Tracing(provider(span_sink(door), f"door:{door_id}"))
    except ImportError as error:
        raise ConfigError(f"door.tracing: {error}: install deltafront[otel]") from None


def check_start(settings: ServiceConfig) -> None:
    """Check before the start everything that would otherwise fail in every replica. Raises ConfigError or
    ModelError."""
    authenticator(settings.door)
    tls_files(settings.door)
    batch_options(settings.door, "", lambda _good, _lines: None)
    make_tracing(settings.door, "").stop()
    directory = Path(settings.model.path)
    model = checked_config(directory, settings.model.overrides)
    if settings.model.adapter is not None:
        AdapterFiles.read(settings.model.adapter, model)
    profile = load_profile(settings.model)
    settings.check_against(model, profile)
    notes = [*quantisation_notes(directory, settings.model.quantisation or settings.model.dtype)]
    notes.append(few_runs_note(profile, settings.default_attention.method))
    for note in filter(None, [*notes, lost_window_note(model)]):
        log.warning("%s", note)
    _tokenizer(settings, directory)
    _default_sampling(settings, directory, model.positions)
    if not model.eos_ids:
        log.warning(
            "%s names no end token (eos_token_id, eos_token, or one after an assistant's message in its chat "
            "template): answers end at stop strings and max_tokens alone",
            directory,
        )


def checked_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Try a model's chat template, then read its config.json and compare it with the weights. Raises
    ModelError."""
    check_chat_template(directory)
    model = read_config(directory, overrides)
    check_weights(directory, model)
    return model


def certificates(door: DoorConfig) -> Certificates:
    ray = os.environ.get("RAY_TLS_SERVER_CERT") if os.environ.get("RAY_USE_TLS") == "1" else None
    return Certificates(door.tls_certificate, Path(ray) if ray else None)


def observer(metrics: Metrics, certificates: Certificates | None = None) -> Callable[[FleetView], None]:
    """Return a function that sets the gauges of workers' states and of certificates' expiry."""

    def observe(view: FleetView) -> None:
        for name, end in certificates.changed() if certificates else ():
            metrics.certificate(name, end)
        every: list[WorkerStats] = [*view.groups.values(), *view.workers.values()]
        metrics.workers.update({stats.name: state_of(stats) for stats in every})
        for stats in every:
            metrics.workers.compiled(stats.name, stats.compilations)
            if isinstance(stats, DecodeStats):
                metrics.workers.tiered(stats.name, stats.tiers)

    return observe
