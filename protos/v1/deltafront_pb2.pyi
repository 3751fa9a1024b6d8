import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpecialTokens(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECIAL_TOKENS_UNSPECIFIED: _ClassVar[SpecialTokens]
    SPECIAL_TOKENS_TEXT: _ClassVar[SpecialTokens]
    SPECIAL_TOKENS_PARSE: _ClassVar[SpecialTokens]

class PageSelection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_SELECTION_UNSPECIFIED: _ClassVar[PageSelection]
    PAGE_SELECTION_FULL: _ClassVar[PageSelection]
    PAGE_SELECTION_DELTA: _ClassVar[PageSelection]

class ServiceTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_TIER_UNSPECIFIED: _ClassVar[ServiceTier]
    SERVICE_TIER_DEFAULT: _ClassVar[ServiceTier]
    SERVICE_TIER_FLEX: _ClassVar[ServiceTier]
    SERVICE_TIER_PRIORITY: _ClassVar[ServiceTier]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
SPECIAL_TOKENS_UNSPECIFIED: SpecialTokens
SPECIAL_TOKENS_TEXT: SpecialTokens
SPECIAL_TOKENS_PARSE: SpecialTokens
PAGE_SELECTION_UNSPECIFIED: PageSelection
PAGE_SELECTION_FULL: PageSelection
PAGE_SELECTION_DELTA: PageSelection
SERVICE_TIER_UNSPECIFIED: ServiceTier
SERVICE_TIER_DEFAULT: ServiceTier
SERVICE_TIER_FLEX: ServiceTier
SERVICE_TIER_PRIORITY: ServiceTier
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason

class ToolCall(_message.Message):
    __slots__ = ("call_id", "name", "arguments")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    name: str
    arguments: str
    def __init__(self, call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    chat_template_kwargs: _struct_pb2.Struct
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: str
    parallel_tool_calls: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "messages", "token_ids", "special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: ChatMessages
    token_ids: bytes
    special_tokens: SpecialTokens
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., special_tokens: _Optional[_Union[SpecialTokens, str]] = ...) -> None: ...

class AttentionMethod(_message.Message):
    __slots__ = ("name", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "ignore_eos", "min_p", "min_tokens", "stop_token_ids", "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    ignore_eos: bool
    min_p: float
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.ScalarMap[int, float]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    top_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("prompt", "attention", "session_ttl", "deadline", "request_id", "cache_salt", "retain_s", "skip_cache", "service_tier")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    attention: AttentionMethod
    session_ttl: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    request_id: str
    cache_salt: str
    retain_s: float
    skip_cache: bool
    service_tier: ServiceTier
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., attention: _Optional[_Union[AttentionMethod, _Mapping]] = ..., session_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., retain_s: _Optional[float] = ..., skip_cache: _Optional[bool] = ..., service_tier: _Optional[_Union[ServiceTier, str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "session_id", "append", "attention", "sampling", "page_selection", "session_ttl", "deadline", "request_id", "answered_ids", "recompute_blocks", "cache_salt", "retain_s", "skip_cache", "constraint", "parse_answer", "service_tier")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PAGE_SELECTION_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_IDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    SKIP_CACHE_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PARSE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    session_id: str
    append: Prompt
    attention: AttentionMethod
    sampling: SamplingOptions
    page_selection: PageSelection
    session_ttl: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    request_id: str
    answered_ids: bytes
    recompute_blocks: int
    cache_salt: str
    retain_s: float
    skip_cache: bool
    constraint: Constraint
    parse_answer: bool
    service_tier: ServiceTier
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., session_id: _Optional[str] = ..., append: _Optional[_Union[Prompt, _Mapping]] = ..., attention: _Optional[_Union[AttentionMethod, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., page_selection: _Optional[_Union[PageSelection, str]] = ..., session_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ..., answered_ids: _Optional[bytes] = ..., recompute_blocks: _Optional[int] = ..., cache_salt: _Optional[str] = ..., retain_s: _Optional[float] = ..., skip_cache: _Optional[bool] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., parse_answer: _Optional[bool] = ..., service_tier: _Optional[_Union[ServiceTier, str]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "choice")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    choice: Choice
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("tokens_done", "tokens_total", "expected_first_token_seconds", "tiles")
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TILES_FIELD_NUMBER: _ClassVar[int]
    tokens_done: int
    tokens_total: int
    expected_first_token_seconds: float
    tiles: _containers.RepeatedCompositeFieldContainer[LayerTiles]
    def __init__(self, tokens_done: _Optional[int] = ..., tokens_total: _Optional[int] = ..., expected_first_token_seconds: _Optional[float] = ..., tiles: _Optional[_Iterable[_Union[LayerTiles, _Mapping]]] = ...) -> None: ...

class LayerTiles(_message.Message):
    __slots__ = ("layer", "computed", "causal")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_FIELD_NUMBER: _ClassVar[int]
    layer: int
    computed: float
    causal: float
    def __init__(self, layer: _Optional[int] = ..., computed: _Optional[float] = ..., causal: _Optional[float] = ...) -> None: ...

class TimingPart(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class StageTimings(_message.Message):
    __slots__ = ("stage", "phases")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    phases: _containers.RepeatedCompositeFieldContainer[TimingPart]
    def __init__(self, stage: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[TimingPart, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("ttft_seconds", "parts", "stages", "total_seconds")
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ttft_seconds: float
    parts: _containers.RepeatedCompositeFieldContainer[TimingPart]
    stages: _containers.RepeatedCompositeFieldContainer[StageTimings]
    total_seconds: float
    def __init__(self, ttft_seconds: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[TimingPart, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StageTimings, _Mapping]]] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class LayerDensity(_message.Message):
    __slots__ = ("layer", "density")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    layer: int
    density: float
    def __init__(self, layer: _Optional[int] = ..., density: _Optional[float] = ...) -> None: ...

class DensityReport(_message.Message):
    __slots__ = ("method", "mean", "layers", "scoring_overhead", "sampled_share")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SCORING_OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SHARE_FIELD_NUMBER: _ClassVar[int]
    method: str
    mean: float
    layers: _containers.RepeatedCompositeFieldContainer[LayerDensity]
    scoring_overhead: float
    sampled_share: float
    def __init__(self, method: _Optional[str] = ..., mean: _Optional[float] = ..., layers: _Optional[_Iterable[_Union[LayerDensity, _Mapping]]] = ..., scoring_overhead: _Optional[float] = ..., sampled_share: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "host_tokens", "disk_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    host_tokens: int
    disk_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "expires", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    expires: _timestamp_pb2.Timestamp
    tokens: int
    def __init__(self, session_id: _Optional[str] = ..., expires: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("session", "usage", "timings", "density", "request_id", "trace_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    session: Session
    usage: Usage
    timings: Timings
    density: DensityReport
    request_id: str
    trace_id: str
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., density: _Optional[_Union[DensityReport, _Mapping]] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    result: PrefillResult
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[_Union[PrefillResult, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class ToolCallPart(_message.Message):
    __slots__ = ("index", "call_id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    call_id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class AnswerPart(_message.Message):
    __slots__ = ("reasoning", "content", "calls")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    reasoning: str
    content: str
    calls: _containers.RepeatedCompositeFieldContainer[ToolCallPart]
    def __init__(self, reasoning: _Optional[str] = ..., content: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[ToolCallPart, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("index", "text", "token_id", "logprob", "top", "answer_parts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    ANSWER_PARTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    answer_parts: _containers.RepeatedCompositeFieldContainer[AnswerPart]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., answer_parts: _Optional[_Iterable[_Union[AnswerPart, _Mapping]]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "text", "usage", "timings", "density", "session", "page_share", "request_id", "trace_id", "recomputed_tokens", "stop_string", "answer_parts", "tool_calls", "reasoning_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SHARE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    ANSWER_PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    text: str
    usage: Usage
    timings: Timings
    density: DensityReport
    session: Session
    page_share: float
    request_id: str
    trace_id: str
    recomputed_tokens: int
    stop_string: str
    answer_parts: _containers.RepeatedCompositeFieldContainer[AnswerPart]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning_tokens: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., density: _Optional[_Union[DensityReport, _Mapping]] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., page_share: _Optional[float] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., recomputed_tokens: _Optional[int] = ..., stop_string: _Optional[str] = ..., answer_parts: _Optional[_Iterable[_Union[AnswerPart, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("progress", "token", "finish")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    token: Token
    finish: Finish
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    def __init__(self, requests: _Optional[int] = ...) -> None: ...

class ReleaseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ReleaseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MethodInfo(_message.Message):
    __slots__ = ("name", "source", "defaults")
    class DefaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    defaults: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., defaults: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ProfileLevel(_message.Message):
    __slots__ = ("method", "options", "density", "tokens")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: str
    options: _containers.ScalarMap[str, float]
    density: float
    tokens: int
    def __init__(self, method: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ..., density: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("model", "levels", "figures")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    model: str
    levels: _containers.RepeatedCompositeFieldContainer[ProfileLevel]
    figures: str
    def __init__(self, model: _Optional[str] = ..., levels: _Optional[_Iterable[_Union[ProfileLevel, _Mapping]]] = ..., figures: _Optional[str] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("setting", "tokens", "samples", "density", "dense", "score", "kept", "low", "high", "lost", "won", "verdict")
    SETTING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DENSITY_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    WON_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    setting: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    samples: int
    density: float
    dense: float
    score: float
    kept: float
    low: float
    high: float
    lost: int
    won: int
    verdict: str
    def __init__(self, setting: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., samples: _Optional[int] = ..., density: _Optional[float] = ..., dense: _Optional[float] = ..., score: _Optional[float] = ..., kept: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., lost: _Optional[int] = ..., won: _Optional[int] = ..., verdict: _Optional[str] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "max_positions", "vocabulary", "default_method", "methods", "prefill_groups", "prefill_stages", "decode_workers", "chunk_tokens", "decode_pages_total", "decode_pages_free", "prefill_pages_total", "prefill_pages_free", "page_tokens", "metrics_address", "full_layers", "delta_layers", "page_budget", "recency", "profile", "recompute_blocks", "display_name", "chat_template", "default_sampling", "default_options", "measured")
    class DefaultOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STAGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DECODE_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FULL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DELTA_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    RECENCY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    max_positions: int
    vocabulary: int
    default_method: str
    methods: _containers.RepeatedCompositeFieldContainer[MethodInfo]
    prefill_groups: int
    prefill_stages: int
    decode_workers: int
    chunk_tokens: int
    decode_pages_total: int
    decode_pages_free: int
    prefill_pages_total: int
    prefill_pages_free: int
    page_tokens: int
    metrics_address: str
    full_layers: _containers.RepeatedScalarFieldContainer[int]
    delta_layers: _containers.RepeatedScalarFieldContainer[int]
    page_budget: int
    recency: int
    profile: Profile
    recompute_blocks: int
    display_name: str
    chat_template: bool
    default_sampling: SamplingOptions
    default_options: _containers.ScalarMap[str, float]
    measured: Measured
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., max_positions: _Optional[int] = ..., vocabulary: _Optional[int] = ..., default_method: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[MethodInfo, _Mapping]]] = ..., prefill_groups: _Optional[int] = ..., prefill_stages: _Optional[int] = ..., decode_workers: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., decode_pages_total: _Optional[int] = ..., decode_pages_free: _Optional[int] = ..., prefill_pages_total: _Optional[int] = ..., prefill_pages_free: _Optional[int] = ..., page_tokens: _Optional[int] = ..., metrics_address: _Optional[str] = ..., full_layers: _Optional[_Iterable[int]] = ..., delta_layers: _Optional[_Iterable[int]] = ..., page_budget: _Optional[int] = ..., recency: _Optional[int] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., recompute_blocks: _Optional[int] = ..., display_name: _Optional[str] = ..., chat_template: _Optional[bool] = ..., default_sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., default_options: _Optional[_Mapping[str, float]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ...) -> None: ...
