"""The Python clients. Importing them loads what a client needs, nothing of a server."""

from ...workers.messages.events import FinishReason, Progress, Session, Token, Usage
from ..errors import (
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
from ..request.answers import Density, GenerateFinished, MethodInfo, PrefillFinished, ServerInfo, Timings
from .async_client import AsyncDeltafrontClient
from .client import DeltafrontClient
from .endpoint import Tls

__all__ = [
    "AsyncDeltafrontClient",
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
    "PrefillFinished",
    "Progress",
    "RemoteError",
    "ServerInfo",
    "Session",
    "Timings",
    "Tls",
    "Token",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
