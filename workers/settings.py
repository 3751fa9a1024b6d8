"""The workers' configuration: frozen dataclasses that need no torch.

The classes are sections of the configuration file (`service/config.py`), which checks their fields' bounds. A
class made in code is not checked.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
"""The tokens whose KV a worker has room for, in whole pages."""
Chunk = Annotated[int, Field(ge=BLOCK, multiple_of=BLOCK)]
"""The tokens of a prefill chunk, in whole attention tiles."""
MAX_RECOMPUTE_BLOCKS = 64
Blocks = Annotated[int, Field(ge=0, le=MAX_RECOMPUTE_BLOCKS)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Layer = Annotated[int, Field(ge=0)]
Directory = Annotated[str, Field(pattern="^/")]
"""An absolute path, on every node."""
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
class ModelSpec:
    """A model, and changes to it.

    Attributes:
        path: A model directory, the embedded default's name, a .gguf file or a hub id.
        adapter: A PEFT LoRA directory that is merged at load.
        dtype: The format of weights, activations and KV cache.
        family_modules: Modules outside the package that register families.
        rope_theta, max_position_embeddings: Replace the model's.
        profile: Its calibration file.
        digest: The `model_digest` that every process compares with what it finds at `path`. Serve's
            application sets it, so that all nodes serve the same model. None: nothing is compared.
        quantisation: `fp8` holds and multiplies the layers' matrices in 8 bits on GPUs, with a scale for each
            output channel and token. Output head, attention and KV cache stay in `dtype`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    path: Annotated[str, Field(min_length=1)]
    adapter: str | None = None
    family_modules: tuple[str, ...] = ()
    dtype: Dtype = "bfloat16"
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    max_position_embeddings: Count | None = None
    profile: str | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    quantisation: Quantisation | None = None

    @property
    def overrides(self) -> dict[str, float | int]:
        given = {"rope_theta": self.rope_theta, "max_position_embeddings": self.max_position_embeddings}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The settings that prefill groups and decode workers share."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    drain_s: NonNegative = 0.0
    """Seconds in which a worker that is taken away ends its prompts, requests and sessions; 0: none."""
    surge: bool = False
    """On a cluster, start new workers before old ones go, one after the other. That needs room for one
    more."""
    device: Device = "cpu"
    """`cpu`, `cuda`, or `cuda:N`."""
    threads: Count = 1
    """CPU threads of each process."""
    node_labels: Labels = field(default_factory=dict)
    """Labels of nodes where stages or decode workers may run; empty: anywhere."""
    stream_lease_s: Positive = 5.0
    """A request is cancelled when its door has not renewed it for this long."""
    kernel_cache: Directory | None = None
    """Where compiled kernels are kept for the next start. None: where Triton keeps them."""


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A prefill group.

    Attributes:
        groups: Number of prefill groups, which prefill different prompts.
        stages: Pipeline stages of a group: processes, each with a share of the layers.
        chunk_tokens: Tokens of the longest chunk. Several GPU stages get shorter chunks.
        cache_tokens: Size of the KV cache in each stage, in tokens.
        cpus_per_stage, gpus_per_stage: CPUs and GPUs that each stage requests from Ray.
    """

    groups: Count = 1
    max_groups: Count | None = None
    """On a cluster, the most groups, started when the backlog needs them. None: always `groups`."""
    backlog_s: Positive = 30.0
    """With max_groups: seconds in which groups should read the waiting prompts."""
    stages: Count = 2
    chunk_tokens: Chunk = 512
    cache_tokens: Room = 32_768
    cpus_per_stage: NonNegative = 0.5
    gpus_per_stage: NonNegative = 0.0
    max_waiting: Count = 64
    """Prompts that may wait in a group."""
    chunk_slack_s: Positive = 1.0
    """A stage is asked for a sign of life when a chunk takes this much longer than twice the request's last
    one. It is replaced if it gives none in 3 s."""
    stall_s: Positive = 300.0
    """Even a stage that gives signs of life is replaced once a chunk has taken this long."""
    unmeasured: Literal["safe", "allow"] = "safe"
    """Without a profile of the model and a `door.default_method`, requests get by default: `safe`, `dense`,
    since nothing sparser is known to keep its answers (docs/experiments/0006); `allow`, `dpxa`."""
    method_modules: tuple[str, ...] = ()
    """Modules outside the package that register methods."""
    method_options: MethodOptions = field(default_factory=dict)
    """This service's defaults for methods' options: `{dpxa: {density: 0.08}}`."""
    warm_up: tuple[WarmedUp, ...] = ()
    """Methods that every stage runs before it takes requests, because a GPU compiles at first use. Some
    options are compiled in, such as `{dpxa: {q_anchors: 32}}`."""

    @property
    def warmed_up(self) -> list[tuple[str, Mapping[str, float]]]:
        given = ({entry: {}} if isinstance(entry, str) else entry for entry in self.warm_up)
        return [item for entry in given for item in entry.items()]

    def method(self, name: str, options: Mapping[str, Value] | None = None) -> MethodSpec:
        """Add this service's defaults to a method's options. Raises MethodError, which names the field."""
        base = name.partition("+")[0]
        return method_spec(name, {**self.method_options.get(base, {}), **(options or {})})


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker and its page selection (DELTA, Algorithm 2).

    Attributes:
        workers: Number of decode workers, which answer different requests.
        tensor_parallel: Ranks of a worker, each on its own GPU with its share of heads and matrices.
        cache_tokens: Size of a worker's KV cache, in tokens.
        max_batch: Maximum number of requests in a worker's batch.
        append_chunk_tokens: Chunk size when a worker prefills tokens after a session or a cached prefix.
        max_session_ttl_s: The longest time for which a client may keep a session.
        page_selection: The default for requests.
        page_budget: K, the number of pages that a sparse layer attends to.
        recency: L, the number of last pages that are always among them.
        full_layers: Dense layers that score no pages.
        delta_layers: Δ-layers: dense layers that score pages. Without any, `delta` is refused.
    """

    workers: Count = 1
    max_workers: Count | None = None
    """On a cluster, the most workers, started when pages and requests need them. None: always `workers`."""
    usage: Fraction = 0.8
    """With max_workers: the largest share of pages that should be in use."""
    tensor_parallel: Count = 1
    cache_tokens: Room = 65_536
    kv_dtype: KVDtype | None = None
    """`int8` keeps the KV cache in 8 bits, in this worker's pages and in those of the stages that fill them.
    None: in model.dtype."""
    host_cache_gib: NonNegative = 0.0
    """A worker's host memory for the prefix cache; 0: none. Cached blocks are copied there, and back when
    they are found only there. It is pinned if the worker is on a GPU."""
    store: Directory | None = None
    """A directory where a worker saves its host memory's cached blocks, in groups of 256 tokens. It outlives
    the worker. Workers of one model may share it. None: nothing is saved."""
    store_gib: Positive = 100.0
    """The most that a worker saves. It evicts the least recently used."""
    max_batch: Count = 16
    max_wait_s: NonNegative = 10.0
    """The longest wait of a reservation for pages. One that is expected to wait longer is refused at once."""
    append_chunk_tokens: Count = 256
    recompute_blocks: Blocks | None = None
    """How many blocks of a sparsely read prompt are computed again with dense attention before the first
    token: those that the question attends to most. The default of requests. None: 8, or 0 where
    `door.default_method` is `dense`."""
    page_selection: Literal["delta", "full"] = "delta"
    page_budget: Count = 64
    recency: Count = 8
    full_layers: tuple[Layer, ...] = (0, 1)
    delta_layers: tuple[Layer, ...] = ()
    max_session_ttl_s: Positive = 3600.0
    cpus: NonNegative = 0.5
    """Each rank asks for this many, and for `gpus` GPUs."""
    gpus: NonNegative = 0.0
    """With `device: cuda`, 0 means that rank i takes GPU i of its host, beside the stage that Ray has put
    there."""
    warm_up: bool = False
    """Decode made-up requests first: a GPU compiles at first use, and only then are decode steps CUDA
    graphs."""

    def contradictions(self) -> Iterator[str]:
        if self.recency > self.page_budget:
            yield f"recency: {self.recency} exceeds page_budget ({self.page_budget})"
        if self.store and not self.host_cache_gib:
            yield "store: it needs host_cache_gib, from where KV is saved"
        if both := sorted({*self.full_layers} & {*self.delta_layers}):
            yield f"full_layers and delta_layers share {both}"

    def layer_problems(self, layers: int, windows: Collection[int] = ()) -> Iterator[str]:
        """Yield a line for each wrong key, which names it first. `windows` are layers with a sliding
        window.
        """
        if among := sorted({*windows} & {*self.delta_layers}):
            yield f"delta_layers names {among}, which attend to a window: such layers choose no pages"
        for key, named in (("full_layers", self.full_layers), ("delta_layers", self.delta_layers)):
            for layer in named:
                if not 0 <= layer < layers:
                    yield f"{key} names layer {layer}, but the model has layers 0 .. {layers - 1}"


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """How the KV cache gets from prefill stages to decode workers.

    Attributes:
        transport: `object_store`: Ray's shared memory. `cuda_ipc`: from GPU to GPU, in one container of one
            host. `nixl`: across hosts, from GPU to GPU or host to host, by RDMA if there is any; it needs its
            package. `mapped`: a stage and a decode worker on one GPU share weights and pages, and nothing is
            handed over.
        ack_timeout_s: A decode worker that takes longer to acknowledge a stage's message counts as failed.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    transport: Literal["object_store", "cuda_ipc", "nixl", "mapped"] = "object_store"
    ack_timeout_s: Positive = 60.0


def pairing(model: ModelSpec, handoff: HandoffConfig, kv_dtype: KVDtype | None) -> str:
    """Return a string that is equal for groups and decode workers with the same KV format and transport.

    While one configuration replaces another, only workers with equal strings can serve a prompt together.
    """
    return repr((replace(model, profile=None), handoff.transport, kv_dtype))
