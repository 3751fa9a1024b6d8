"""One answer over HTTP: its events become a whole object, or chunks of a stream."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from deltafront.service.door.edges.edge import EdgeReply, Json
from deltafront.service.door.edges.parts import AnswerSplitter
from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import AnswerPart, Echo, GenerateFinished, RequestEvent
from deltafront.workers.messages.events import Token, Usage


class Answering(Protocol):
    """Turns a request's events into its HTTP answer: one object, or the chunks of a stream."""

    def take(self, event: RequestEvent) -> None:
        """Collect an event for `whole`, which makes one object of all events."""
        ...

    def whole(self) -> Json: ...

    def chunks(self, event: RequestEvent) -> Iterable[Json]:
        """Return the chunks that an event adds to a stream."""
        ...

    def fail(self, error: DeltafrontError) -> Iterable[Json]: ...


class OneAnswer:
    """The answer of a request that has one answer, or one of several answers (`Choices`).

    Attributes:
        logprob: Sum of its tokens' log-probabilities.
    """

    def __init__(self, reply: EdgeReply, splitter: AnswerSplitter) -> None:
        self.reply = reply
        self.splitter = splitter
        self.parts: list[AnswerPart] = []
        self.finish: GenerateFinished | None = None
        self.logprob = 0.0
        self._usage = Usage(prompt_tokens=0)

    @property
    def finished(self) -> GenerateFinished:
        assert self.finish is not None, "no answer is told before its end"
        return self.finish

    def take(self, event: RequestEvent) -> None:
        self.parts += self._split(event)

    def whole(self) -> Json:
        return self.reply.answer(self.parts, self.finished)

    def chunks(self, event: RequestEvent) -> Iterable[Json]:
        if isinstance(event, Usage):
            self._usage = event
            return self.reply.begin(event)
        parts = self._split(event)
        if isinstance(event, GenerateFinished):
            return self.reply.end(parts, event)
        if isinstance(event, Token):
            self._usage = replace(self._usage, completion_tokens=event.index + 1)
        return self.reply.grow(parts, self._usage)

    def fail(self, error: DeltafrontError) -> Iterable[Json]:
        return self.reply.fail(error)

    def _split(self, event: RequestEvent) -> list[AnswerPart]:
        if isinstance(event, Token):
            self.logprob += event.logprob
            self.reply.token(event)
            return self.splitter.push(event.text, event.index + 1)
        if isinstance(event, Echo):
            for token in event.tokens:
                self.reply.token(token)
            return [AnswerPart(content=event.text)] if event.text else []
        if isinstance(event, GenerateFinished):
            self.finish = event
            return self.splitter.push(event.text, event.usage.completion_tokens, last=True)
        return []
