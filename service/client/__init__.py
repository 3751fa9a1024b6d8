"""The Python clients. Importing them loads no code of the server."""

from deltafront.service.client.async_client import AsyncDeltafrontClient
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.client.endpoint import Tls
from deltafront.service.errors import (
    Cancelled,
    Code,
    ConnectionLost,
    DeadlineExceeded,
    DeltafrontError,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    RemoteError,
    Unauthenticated,
    Unavailable,
)
from deltafront.service.request.answers import (
    AnswerPart,
    CallPart,
    Density,
    GenerateFinished,
    MethodInfo,
    ParsedToken,
    PrefillFinished,
    ServerInfo,
    Timings,
    ToolCall,
)
from deltafront.workers.messages.events import FinishReason, Progress, Session, Token, Usage

__all__ = [
    "AnswerPart",
    "AsyncDeltafrontClient",
    "CallPart",
    "Cancelled",
    "Code",
    "ConnectionLost",
    "DeadlineExceeded",
    "DeltafrontClient",
    "DeltafrontError",
    "Density",
    "FinishReason",
    "GenerateFinished",
    "Internal",
    "InvalidArgument",
    "MethodInfo",
    "NotFound",
    "Overloaded",
    "ParsedToken",
    "PrefillFinished",
    "Progress",
    "RemoteError",
    "ServerInfo",
    "Session",
    "Timings",
    "Tls",
    "Token",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
