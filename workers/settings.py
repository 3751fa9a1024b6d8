"""The workers' configuration, as frozen dataclasses. It imports no torch.

Each class is a section of the configuration file. `service/config.py` checks the fields' bounds when it reads
the file; an object made in code is not checked.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.kernels.options import Value

_STRICT: dict[str, Any] = {"extra": "forbid"}

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Room = Annotated[int, Field(ge=PAGE_TOKENS, multiple_of=PAGE_TOKENS)]
"""Size of a worker's KV cache in tokens, a multiple of the page size."""
Chunk = Annotated[int, Field(ge=BLOCK, multiple_of=BLOCK)]
"""Tokens of a prefill chunk, a multiple of the attention tile's size."""
MAX_RECOMPUTE_BLOCKS = 64
Blocks = Annotated[int, Field(ge=0, le=MAX_RECOMPUTE_BLOCKS)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Layer = Annotated[int, Field(ge=0)]
Directory = Annotated[str, Field(pattern="^/")]
"""An absolute path that exists on every node."""
Dtype = Literal["bfloat16", "float16", "float32"]
Quantisation = Literal["fp8"]
KVDtype = Literal["int8"]
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
Labels = Mapping[
    Annotated[str, Field(pattern=rf"^([a-z0-9.-]+/)?{_NAME}$")], Annotated[str, Field(pattern=rf"^{_NAME}$")]
]
"""Labels that a Ray node must have, in Kubernetes' form."""

MethodOptions = Mapping[str, Mapping[str, float]]
WarmedUp = Annotated[
    Annotated[str, Tag("name")] | Annotated[MethodOptions, Tag("options")],
    Discriminator(lambda given: "name" if isinstance(given, str) else "options"),
]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN (Peng et al. 2023), as in config.json's section of this name."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    factor: Annotated[float, Field(gt=1, le=64)]
    original_max_position_embeddings: Count
    rope_type: Literal["yarn"] = "yarn"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model, and changes to it.

    Attributes:
        path: A model directory, a .gguf file, a hub id, or the name of the embedded demo model.
        adapter: The directory of a PEFT LoRA adapter, which is merged into the weights at load.
        dtype: The format of weights, activations and KV cache.
        family_modules: Python modules outside the package that register model families.
        rope_scaling: YaRN, in place of the scaling in the model's configuration: a `factor` above 1, at most
            64, and `original_max_position_embeddings`. Short prompts are scaled, too.
        rope_theta, max_position_embeddings: Replace the value in the model's configuration.
        profile: The model's file from `deltafront calibrate` or `deltafront evaluate`.
        digest: The expected `model_digest`. Every process compares it with the model at `path`. Serve's
            application sets it, so that all nodes serve the same model. None: nothing is compared.
        quantisation: `fp8` runs the layers' GEMMs in 8 bits on GPUs, with a scale for each output channel and
            each token. Output head, attention and KV cache stay in `dtype`.
        rolling_buffer: Layers with windows keep only their window's KV (Jiang et al. 2023, section 2), not
            all tokens'.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    path: Annotated[str, Field(min_length=1)]
    adapter: str | None = None
    family_modules: tuple[str, ...] = ()
    dtype: Dtype = "bfloat16"
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: Count | None = None
    profile: str | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    quantisation: Quantisation | None = None
    rolling_buffer: bool = False

    @property
    def overrides(self) -> dict[str, Any]:
        given = {
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else asdict(self.rope_scaling),
            "max_position_embeddings": self.max_position_embeddings,
            "rolling_buffer": self.rolling_buffer or None,
        }
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The settings that prefill groups and decode workers share."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    drain_s: NonNegative = 0.0
    """Seconds that a worker gets to finish its requests and sessions before it is removed; 0: none."""
    surge: bool = False
    """On a cluster, replace workers one by one, and start each new one before the old one ends. That needs
    resources for one more worker."""
    device: Device = "cpu"
    """`cpu`, `cuda`, or `cuda:N`."""
    threads: Count = 1
    """CPU threads of each process."""
    node_labels: Labels = field(default_factory=dict)
    """Labels that a node must have to run stages or decode workers; empty: any node."""
    stream_lease_s: Positive = 5.0
    """Seconds after which a worker cancels a request that its API server has not renewed."""
    kernel_cache: Directory | None = None
    """Directory of compiled kernels, which the next start reuses. None: Triton's default."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A prefill group.

    Attributes:
        groups: Number of prefill groups. Each prompt is prefilled by one group.
        stages: Pipeline stages of a group. Each is a process with a share of the layers.
        chunk_tokens: Tokens of the longest chunk. With several GPU stages, chunks are shorter.
        cache_tokens: Size of the KV cache in each stage, in tokens.
        cpus_per_stage, gpus_per_stage: CPUs and GPUs that each stage requests from Ray.
    """

    groups: Count = 1
    max_groups: Count | None = None
    """On a cluster, the largest number of groups. More start when the backlog grows. None: always
    `groups`."""
    backlog_s: Positive = 30.0
    """With max_groups: add groups if prefilling the waiting prompts would take more than this many
    seconds."""
    stages: Count = 2
    chunk_tokens: Chunk = 512
    cache_tokens: Room = 32_768
    cpus_per_stage: NonNegative = 0.5
    gpus_per_stage: NonNegative = 0.0
    max_waiting: Count = 64
    """Maximum number of prompts that wait in a group."""
    chunk_slack_s: Positive = 1.0
    """The controller asks a stage for a sign of life when a chunk takes this many seconds longer than twice
    the time of the request's last chunk. A stage that does not answer in 3 s is replaced."""
    stall_s: Positive = 300.0
    """Seconds after which a stage is replaced that still works on one chunk, even if it answers."""
    unmeasured: Literal["safe", "allow"] = "safe"
    """The default attention method of a model without a profile, if `door.default_method` is not set. `safe`:
    `dense`. `allow`: `dpxa`."""
    method_modules: tuple[str, ...] = ()
    """Python modules outside the package that register attention methods."""
    method_options: MethodOptions = field(default_factory=dict)
    """Default options of attention methods, such as `{dpxa: {density: 0.08}}`."""
    warm_up: tuple[WarmedUp, ...] = ()
    """Attention methods whose kernels every stage compiles before it takes requests. Name options that change
    the kernels, such as `{dpxa: {q_anchors: 32}}`."""

    @property
    def warmed_up(self) -> list[tuple[str, Mapping[str, float]]]:
        given = ({entry: {}} if isinstance(entry, str) else entry for entry in self.warm_up)
        return [item for entry in given for item in entry.items()]

    def method(self, name: str, options: Mapping[str, Value] | None = None) -> MethodSpec:
        """Return the attention method `name`. `options` override `method_options`. Raises MethodError."""
        base = name.partition("+")[0]
        return method_spec(name, {**self.method_options.get(base, {}), **(options or {})})


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker and its page selection (DELTA, Algorithm 2).

    Attributes:
        workers: Number of decode workers. Each request is decoded by one worker.
        tensor_parallel: Tensor-parallel ranks of a worker, each on its own GPU.
        cache_tokens: Size of a worker's KV cache, in tokens.
        max_batch: Maximum number of requests in a worker's batch.
        append_chunk_tokens: Chunk size when a worker prefills tokens after a session or a cached prefix.
        max_session_ttl_s: Maximum number of seconds for which a client may keep a session.
        page_selection: The page selection of requests that name none.
        page_budget: K, the number of pages that a sparse layer attends to.
        recency: L, the number of most recent pages that are always among the K pages.
        full_layers: Layers that attend to all pages and score none.
        delta_layers: Δ-layers: they attend to all pages and score them. Without any, `delta` is refused.
    """

    workers: Count = 1
    max_workers: Count | None = None
    """On a cluster, the largest number of workers. More start when the load grows. None: always `workers`."""
    usage: Fraction = 0.8
    """With max_workers: a worker is added if a larger share of all pages would be in use."""
    tensor_parallel: Count = 1
    cache_tokens: Room = 65_536
    kv_dtype: KVDtype | None = None
    """The format of the KV cache in decode workers and prefill stages. `int8`: 8 bits. None: model.dtype."""
    host_cache_gib: NonNegative = 0.0
    """GiB of host memory to which a worker offloads its prefix cache; 0: none. On a GPU worker this memory is
    pinned."""
    store: Directory | None = None
    """A directory where a worker saves its prefix cache from host memory, in files of 256 tokens or a state.
    They outlive the worker, and workers of one model may share them. None: nothing is saved."""
    store_gib: Positive = 100.0
    """Maximum size of a worker's files in GiB. It evicts the least recently used."""
    max_batch: Count = 64
    target_gap_ms: NonNegative | None = None
    """While prompts are being prefilled for this worker, decode steps start at least this many milliseconds
    apart, so that prefill on the same GPU has most of it. 0: no pause. None: with `handoff.transport: mapped`
    30 while one prompt waits and 45 while several do, else 0."""
    max_wait_s: NonNegative = 10.0
    """Maximum number of seconds that a request waits for free pages. A request that is expected to wait
    longer is refused at once."""
    append_chunk_tokens: Count = 256
    state_slots: Count = 160
    """Slots for states of linear attention or rolling buffers. A request needs two, a session one. The prefix
    cache keeps states in the others, from which later prompts continue."""
    recompute_blocks: Blocks | None = None
    """Number of 128-token blocks of a sparsely prefilled prompt that are recomputed with dense attention
    before the first token: those that the question attends to most. Requests may override it. None: 32, or 0
    if `door.default_method` is `dense` or the model's layers have states."""
    page_selection: Literal["delta", "full"] = "delta"
    page_budget: Count = 64
    recency: Count = 8
    full_layers: tuple[Layer, ...] = (0, 1)
    delta_layers: tuple[Layer, ...] = ()
    max_session_ttl_s: Positive = 3600.0
    cpus: NonNegative = 0.5
    """CPUs that each rank requests from Ray."""
    gpus: NonNegative = 0.0
    """GPUs that each rank requests from Ray. With `device: cuda`, 0 means that rank i shares GPU i of its
    host with the stage that runs there."""
    warm_up: bool = False
    """Compile all kernels and capture the CUDA graphs of decode steps before the worker takes requests.
    Without it, decode steps are not CUDA graphs."""

    def contradictions(self) -> Iterator[str]:
        if self.recency > self.page_budget:
            yield f"recency: {self.recency} exceeds page_budget ({self.page_budget})"
        if self.store and not self.host_cache_gib:
            yield "store: it needs host_cache_gib, from where KV is saved"
        if both := sorted({*self.full_layers} & {*self.delta_layers}):
            yield f"full_layers and delta_layers share {both}"

    def layer_problems(
        self, layers: int, windows: Collection[int] = (), linear: Collection[int] = ()
    ) -> Iterator[str]:
        """Yield a message for each wrong key. The message begins with the key.

        Args:
            layers: Number of the model's layers.
            windows: The layers with a sliding window.
            linear: The layers with linear attention.
        """
        if among := sorted({*linear} & {*self.delta_layers}):
            yield f"delta_layers names {among}, which have linear attention and therefore no pages"
        if among := sorted({*windows} & {*self.delta_layers}):
            yield f"delta_layers names {among}, which attend to a window: such layers choose no pages"
        for key, named in (("full_layers", self.full_layers), ("delta_layers", self.delta_layers)):
            for layer in named:
                if not 0 <= layer < layers:
                    yield f"{key} names layer {layer}, but the model has layers 0 .. {layers - 1}"


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """The transport of KV from prefill stages to decode workers.

    Attributes:
        transport: `object_store`: Ray's shared memory. `cuda_ipc`: from GPU to GPU, in one container of one
            host. `nixl`: from GPU to GPU or host to host, also across hosts, by RDMA where there is any; it
            needs the package nixl. `mapped`: a stage and a decode worker on one GPU share weights and pages,
            so that nothing is copied.
        ack_timeout_s: Seconds after which a decode worker counts as failed that has not acknowledged a
            stage's message.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    transport: Literal["object_store", "cuda_ipc", "nixl", "mapped"] = "object_store"
    ack_timeout_s: Positive = 60.0


def pairing(model: ModelSpec, handoff: HandoffConfig, kv_dtype: KVDtype | None, ranks: int) -> str:
    """Return a string that is equal for prefill groups and decode workers that can serve a prompt together.

    They need the same model, KV format and transport, and with `nixl` the same ranks of a decode worker.
    While a new configuration is rolled out, workers of the old one still run.
    """
    gathered = {"ranks": ranks} if handoff.transport == "nixl" and ranks > 1 else None
    return repr((replace(model, profile=None), handoff.transport, kv_dtype, gathered))
