"""From a configuration to the door's parts; free of Ray and Serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .. import __version__
from ..workers.messages import DecodeStats, GroupStats
from ..workers.model.config import read_config
from ..workers.model.store import resolve, resolve_adapter
from ..workers.settings import ModelSpec
from .config import ConfigError, DoorConfig, ServiceConfig
from .door.auth import Authenticator, TokenFile
from .door.grpc_door import About
from .door.validate import Limits
from .fleet.view import Fleet, View
from .metrics import Metrics
from .request.attempt import Resources
from .request.tokenizer import TextTokenizer


def local_model(settings: ServiceConfig) -> ServiceConfig:
    """The same configuration with model and adapter as directories, everything checked.

    Downloads or converts the model if need be. Raises ModelError or ConfigError.
    """
    spec = settings.model
    adapter = None if spec.adapter is None else str(resolve_adapter(spec.adapter))
    found = settings.with_model(path=str(resolve(spec.path)), adapter=adapter)
    if not settings.door.model_name:
        door = replace(settings.door, model_name=shown_name(spec))
        found = found.model_copy(update={"door": door})
    check_start(found)
    return found


def shown_name(spec: ModelSpec) -> str:
    """What GetServerInfo calls a model, so that no server's directories are shown."""
    name = spec.path if not Path(spec.path).exists() else Path(spec.path).name
    return name if spec.adapter is None else f"{name} + {Path(spec.adapter).name}"


def prepare(settings: ServiceConfig, fleet: Fleet, metrics: Metrics) -> tuple[Resources, Limits]:
    """Tokenizer, model facts and limits. Raises ModelError or FileNotFoundError."""
    directory = Path(settings.model.path)
    model = read_config(directory, settings.model.overrides)
    door = settings.door
    tokenizer = TextTokenizer.load(directory)
    resources = Resources(fleet, tokenizer, metrics, door, model.vocab, model.positions, model.eos_ids)
    limits = Limits(
        vocabulary=model.vocab,
        positions=model.positions,
        default_method=door.default_method,
        default_max_tokens=door.default_max_tokens,
        default_ttl_s=door.default_session_ttl_s,
        max_ttl_s=settings.decode.max_session_ttl_s,
        delta_decode=bool(settings.decode.delta_layers),
    )
    return resources, limits


def authenticator(door: DoorConfig) -> Authenticator:
    """Raises ConfigError for a token file that cannot be used."""
    if door.tokens_file is None:
        return Authenticator(None)
    try:
        return Authenticator(TokenFile(door.tokens_file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"door.tokens_file: {error}") from None


def about(settings: ServiceConfig, metrics_address: str) -> About:
    return About(
        version=__version__,
        model=settings.door.model_name or settings.model.path,
        prefill_stages=settings.prefill.stages,
        chunk_tokens=settings.prefill.chunk_tokens,
        metrics_address=metrics_address,
    )


def check_start(settings: ServiceConfig) -> None:
    """What would otherwise fail in a replica, over and over: the token file, the model's files, the split."""
    authenticator(settings.door)
    directory = Path(settings.model.path)
    settings.check_against(read_config(directory, settings.model.overrides))
    TextTokenizer.load(directory)


def observer(metrics: Metrics) -> Callable[[View], None]:
    """What the fleet's polls say, as gauges."""

    def observe(view: View) -> None:
        every: list[GroupStats | DecodeStats] = [*view.groups.values(), *view.workers.values()]
        usage = {one.name: 1 - one.pages_free / one.pages_total for one in every if one.pages_total}
        metrics.state(
            usage,
            running=sum(one.running for one in every),
            waiting=sum(one.waiting for one in every),
            sessions=sum(one.sessions for one in view.workers.values()),
        )

    return observe
