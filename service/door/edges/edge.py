"""The interface of a protocol over HTTP (an edge): it parses bodies, and formats answers and errors.

In the door, a conversation is a `GenerateRequest` with messages and tools, and an answer is a stream of
`AnswerPart`. An edge converts both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deltafront.service.door.edges.parts import AnswerSplitter
from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import AnswerPart, GenerateFinished
from deltafront.service.request.calls import GenerateRequest
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.workers.messages.events import Token, Usage

if TYPE_CHECKING:
    from deltafront.service.door.edges.answering import Answering, OneAnswer

Json = dict[str, Any]


class EdgeReply(Protocol):
    """Formats one answer: whole by `answer`, or streamed by the other methods, whose objects become
    events."""

    def answer(self, parts: list[AnswerPart], finish: GenerateFinished) -> Json:
        """Make the object of a complete answer."""
        ...

    def begin(self, usage: Usage) -> Iterable[Json]: ...

    def token(self, token: Token) -> None:
        """Take a token. The parts of its text, if any, follow."""
        ...

    def grow(self, parts: list[AnswerPart], usage: Usage) -> Iterable[Json]: ...

    def end(self, parts: list[AnswerPart], finish: GenerateFinished) -> Iterable[Json]: ...

    def fail(self, error: DeltafrontError) -> Iterable[Json]:
        """Abandon the answer, and end a stream that has begun."""
        ...


@dataclass(frozen=True)
class ReplyContext:
    """The context in which an answer is formatted.

    Args:
        positions: Maximum tokens of prompt and answer together.
        token_bytes: Returns the bytes of tokens. The first call takes long.
        index: The answer's index among those of its request.
    """

    model: str
    positions: int
    request_id: str
    splitter: AnswerSplitter
    token_bytes: Callable[[], TokenBytes]
    index: int = 0


@dataclass(frozen=True)
class Asked:
    """A parsed request.

    Args:
        include_progress: Comments report the progress of prefill.
        several: Combines several answers; None: the request has one.
    """

    request: GenerateRequest
    reply: Callable[[ReplyContext], EdgeReply]
    stream: bool = False
    include_progress: bool = False
    several: Callable[[Sequence[OneAnswer]], Answering] | None = None


class Edge(Protocol):
    """A protocol's endpoint."""

    @property
    def splits(self) -> bool:
        """True if answers separate reasoning from text."""
        ...

    @property
    def named_events(self) -> bool:
        """True if each event of a stream is named by its object's `type`."""
        ...

    @property
    def ends_with(self) -> bytes:
        """The end of a complete stream."""
        ...

    def read(self, body: bytes, model: str, owner: str) -> Asked:
        """Parse a body. Any thread may call it. Raises InvalidArgument, UnknownModel or NotFound."""
        ...

    def error(self, error: DeltafrontError, positions: int, request_id: str) -> Json: ...
