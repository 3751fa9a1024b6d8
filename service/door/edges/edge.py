"""What a protocol over HTTP has to say: how it reads a body, and how it words answers and errors.

Inside, a conversation is a `GenerateRequest` with messages and tools, and an answer is a stream of
`AnswerPart`. An edge translates both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deltafront.service.door.edges.parts import AnswerSplitter
from deltafront.service.door.reasoning import AnswerPart
from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import GenerateFinished
from deltafront.service.request.calls import GenerateRequest
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.workers.messages.events import Token, Usage

if TYPE_CHECKING:
    from deltafront.service.door.edges.answering import Answering, OneAnswer

Json = dict[str, Any]


class EdgeReply(Protocol):
    """Words one answer: whole by `answer`, or streamed by the others, whose objects become events."""

    def answer(self, parts: list[AnswerPart], finish: GenerateFinished) -> Json:
        """Make the object of a complete answer."""
        ...

    def begin(self, usage: Usage) -> Iterable[Json]: ...

    def token(self, token: Token) -> None:
        """Take a token, before its parts, if it has any."""
        ...

    def grow(self, parts: list[AnswerPart], usage: Usage) -> Iterable[Json]: ...

    def end(self, parts: list[AnswerPart], finish: GenerateFinished) -> Iterable[Json]: ...

    def fail(self, error: DeltafrontError) -> Iterable[Json]:
        """Give the answer up, and end a stream that has begun to be sent."""
        ...


@dataclass(frozen=True)
class ReplyContext:
    """What an answer needs beside its request.

    Args:
        positions: Tokens of prompt and answer together.
        token_bytes: Returns the bytes of tokens, which take long to find the first time.
        index: The answer's place among those of its request.
    """

    model: str
    positions: int
    request_id: str
    splitter: AnswerSplitter
    token_bytes: Callable[[], TokenBytes]
    index: int = 0


@dataclass(frozen=True)
class Asked:
    """A body that was read.

    Args:
        include_progress: Comments say how much of the prompt is prefilled.
        several: Puts answers together; None: the request has one.
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
        """Whether answers tell reasoning from text."""
        ...

    @property
    def named_events(self) -> bool:
        """Whether each event of a stream is named by its object's `type`."""
        ...

    @property
    def ends_with(self) -> bytes:
        """The end of a complete stream."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """What keeps a stream alive while its prompt is prefilled."""
        ...

    def read(self, body: bytes, model: str, owner: str) -> Asked:
        """Read a body, in any thread. Raises InvalidArgument, UnknownModel or NotFound."""
        ...

    def error(self, error: DeltafrontError, positions: int, request_id: str) -> Json: ...
