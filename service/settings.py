"""The doors' section of the configuration file. Workers' sections are in `workers/settings.py`."""

import dataclasses
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.workers.settings import Count, Labels, NonNegative, Positive
from deltafront.workers.tracing import CONSOLE

_ID_MARKS = "._:/+-"
MODEL_ID = re.compile(f"[A-Za-z0-9][A-Za-z0-9{re.escape(_ID_MARKS)}]*")

Port = Annotated[int, Field(ge=1, le=65_535)]
Host = Annotated[str, AfterValidator(lambda given: str(ipaddress.ip_address(given)))]
"""An IP address of this machine; `0.0.0.0` or `::` for all."""
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]
"""A web origin, such as https://chat.example.org; `*` for all."""
File = Annotated[Path, AfterValidator(lambda path, info: Path((info.context or {}).get("folder", "")) / path)]
"""A relative path begins at the configuration file's folder."""


def _place(given: str, info: ValidationInfo) -> str:
    is_path = given and "://" not in given
    return str(Path((info.context or {}).get("folder", "")) / given) if is_path else given


Place = Annotated[str, AfterValidator(_place)]
"""A path, relative to the configuration file's folder, or a URL that fsspec knows."""


@dataclass(frozen=True, kw_only=True)
class DoorConfig:
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    replicas: Count = 2
    """Number of doors. With two, clients notice only a pause when one dies."""
    per_node: Count | None = None
    """The most doors on one node. None: any number."""
    node_labels: Labels = dataclasses.field(default_factory=dict)
    """Labels of nodes where doors may run; empty: anywhere."""
    drain_s: NonNegative = 0.0
    """How long a removed door may take to finish its requests, in addition to five seconds. The Python client
    resumes an interrupted request at another door."""
    cpus: NonNegative = 0.1
    """CPUs that each door asks Ray for."""
    host: Host = "127.0.0.1"
    """The address at which clients' ports listen: on a cluster `0.0.0.0`, because clients come to the pod's
    address. Other ports of `deltafront serve` listen on loopback."""
    max_requests: Count = 256
    """The most requests that one door runs at once. More get RESOURCE_EXHAUSTED."""
    grpc_port: Port = 9000
    """The gRPC port, for the Python client and the command line."""
    http_port: Port = 8000
    """The port of OpenAI's API."""
    metrics_port: Port = 9464
    """The port of Prometheus metrics."""
    metrics_host: Host | None = None
    """The address at which the metrics port listens. By default `host`."""
    tracing: str = ""
    """Where OpenTelemetry spans go: the URL of a collector's OTLP over HTTP, such as
    http://collector:4318/v1/traces, or `console`.
    """
    max_message_bytes: Annotated[int, Field(ge=1 << 22, le=(1 << 31) - 1)] = 16 << 20
    """The largest request. Receiving one takes a few times as much memory. Texts that wait to be tokenised
    may have four times this in all, and half of that for one bearer token; further requests get
    RESOURCE_EXHAUSTED. Such texts take six times their size in memory."""
    allowed_origins: tuple[Origin, ...] = ()
    """Web pages of these origins may call OpenAI's API from a browser (CORS)."""
    page: bool = True
    """Serve a page for browsers at `/` of http_port."""
    tokens_file: File | None = None
    """A file of bearer tokens (`service/door/auth.py`). Without it everyone may call and use any session."""
    token_requests: Count | None = None
    """The most requests that one bearer token may run at once, unless its line in `tokens_file` says
    otherwise."""
    token_tokens: Count | None = None
    """The most tokens of KV cache, including sessions, that one bearer token may hold, unless its line in
    `tokens_file` says otherwise."""
    token_requests_per_minute: Count | None = None
    """The most requests a minute of one bearer token, unless its line in `tokens_file` says otherwise. Each
    door permits an equal share."""
    token_tokens_per_minute: Count | None = None
    """Likewise for tokens that are prefilled or answered (`service/request/rates.py`)."""
    tls_certificate: File | None = None
    """A PEM file. With it every door also serves gRPC with TLS on tls_port. A changed file is read again."""
    tls_key: File | None = None
    """A PEM file with the key of tls_certificate."""
    tls_client_ca: File | None = None
    """A PEM file. With it clients need a certificate that this CA signed."""
    tls_port: Port = 9443
    """The port of gRPC with TLS."""
    tls_only: bool = True
    """With TLS, refuse requests on Ray Serve's ports, which cannot be encrypted."""
    model_name: str = ""
    """The model's name in APIs. By default made from model.path."""
    display_name: str = ""
    """The model's readable name. By default model_name if that is given, else the model's own name."""
    default_method: str = ""
    """The attention method of requests that name none. By default the profile's measured setting, with its
    options and `decode.recompute_blocks`; without one `dpxa` if the model has a profile, else
    `prefill.unmeasured` decides.
    """
    default_options: Mapping[str, float] = field(default_factory=dict)
    """Options of default_method, for requests that name neither a method nor options."""
    default_max_tokens: Count = 256
    """The longest answer in tokens, for requests that set no limit."""
    reasoning: Literal["think", "off"] = "off"
    """`think`: chat answers over HTTP return the text in <think>…</think> as reasoning."""
    response_store_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """Memory of each door for conversations that `previous_response_id` continues. A door keeps them for an
    hour, or until newer ones need the room. 0: it keeps none."""
    batches: Place = ""
    """Where `/v1/files` and `/v1/batches` store: a folder that all doors share, or a URL for fsspec such as
    s3://bucket/folder (with the package s3fs). Empty: both are off. Each service needs its own place."""
    batch_store_bytes: Count = 64 << 30
    """The most bytes in `batches`. One bearer token may use half, and never more than then stays free."""
    batch_requests: Count = 16
    """The most lines of batches that run at once. They have service tier `flex`, and count as requests of
    their bearer token."""
    sampling_defaults: Literal["model", "neutral"] = "neutral"
    """The default of temperature, top_p, top_k and min_p. `model`: the values of the model's
    generation_config.json, as in vLLM. `neutral`: greedy."""
    default_session_ttl_s: Positive = 600.0
    """How long a session is kept if its request sets no time."""
    prefix_reuse: bool = True
    """Decode workers keep a prefix cache. A prompt hits cached blocks with the same beginning and owner, if
    they were made by dense attention or by the same method and options. Without tokens_file all callers are
    one owner."""
    state_spacing: Annotated[int, Field(ge=PAGE_TOKENS, multiple_of=PAGE_TOKENS)] = 8192
    """With linear attention or rolling buffers: tokens between cached states of a prompt, besides the one at
    its last page boundary. Later prompts can only continue from a state."""
    prefix_scope: Literal["owner", "all"] = "owner"
    """`all`: callers share the prefix cache. Then a caller who guesses the beginning of another's prompt can
    see from the time and from `cached_tokens` that it was sent."""
    shadow: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of sparsely prefilled prompts, such as 0.001, whose answers idle decode workers read again with
    dense attention, for the metrics `deltafront_shadow_*`. 0: none."""
    replays: Annotated[int, Field(ge=0, le=10)] = 2
    """Retries of a request after its worker died."""
    worker_wait_s: Positive = 60.0
    """How long a request waits for a worker while a role has none."""
    refresh_s: Positive = 1.0
    """How often a door asks every worker for its state."""
    renew_s: Positive = 1.0
    """How often a door renews its requests' leases (`stream_lease_s` of workers)."""

    @property
    def token_limits(self) -> tuple[int | None, ...]:
        """Return a caller's usual limits, in the order of `Quota`."""
        return (
            self.token_requests,
            self.token_tokens,
            self.token_requests_per_minute,
            self.token_tokens_per_minute,
        )

    @property
    def metrics_at(self) -> str:
        return self.metrics_host or self.host

    def contradictions(self) -> Iterator[str]:
        if self.default_options and not self.default_method:
            yield "door.default_options: are of door.default_method, which is not given"
        if self.model_name and not MODEL_ID.fullmatch(self.model_name):
            yield (
                f"door.model_name = {self.model_name!r}: is an id, of letters, digits and {_ID_MARKS}; "
                "what people are shown is door.display_name"
            )
        if self.tokens_file is None and any(self.token_limits):
            yield "door.tokens_file: missing, and without it there is no token to limit"
        if (self.tls_certificate is None) != (self.tls_key is None):
            yield "door.tls_certificate and door.tls_key: both are needed, or none"
        if self.tls_client_ca is not None and self.tls_certificate is None:
            yield "door.tls_client_ca: needs door.tls_certificate"
        if self.tls_certificate and self.tls_port in (self.grpc_port, self.http_port, self.metrics_port):
            yield "door.tls_port: must differ from the other ports"
        if self.tracing and self.tracing != CONSOLE and not self.tracing.startswith(("http://", "https://")):
            yield f"door.tracing = {self.tracing!r}: must be a URL, or {CONSOLE}"
        if len({self.grpc_port, self.http_port, self.metrics_port}) < 3:
            yield "door: grpc_port, http_port and metrics_port must differ"
