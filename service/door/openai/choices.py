"""Several answers of one request: the choices of its prompts, whole or in chunks of one stream."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from deltafront.service.door.edges.answering import OneAnswer
from deltafront.service.door.edges.edge import Json
from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import AnswerPart, ChoiceEvent, GenerateFinished, RequestEvent
from deltafront.workers.messages.events import Usage


class ChoiceReply(Protocol):
    def choice(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> Json: ...

    def together(
        self, choices: list[Json], usage: Usage, reasoned: int | None, finish: GenerateFinished
    ) -> Json: ...

    def usage_chunk(self, usage: Usage, reasoned: int | None) -> Json: ...

    def fail(self, error: DeltafrontError) -> Iterable[Json]: ...


class Choices:
    """Answers of a request, prompt by prompt.

    Args:
        replies: Formats each answer. In a stream, this class sends the usage instead.
        shown: Number of likeliest answers returned for each prompt (`n`). A stream returns all answers.
        each: Number of answers generated for each prompt (`best_of`).
        tells_usage: True if a stream ends with the usage of all answers.
    """

    def __init__(
        self,
        answers: Sequence[OneAnswer],
        replies: Sequence[ChoiceReply],
        shown: int,
        each: int,
        tells_usage: bool,
    ) -> None:
        self._answers, self._replies = answers, replies
        self._shown, self._each, self._tells_usage = shown, each, tells_usage

    def take(self, event: RequestEvent) -> None:
        assert isinstance(event, ChoiceEvent)
        self._answers[event.index].take(event.event)

    def whole(self) -> Json:
        shown = [index for first in range(0, len(self._answers), self._each) for index in self._best(first)]
        choices = [
            {**self._replies[index].choice(self._answers[index].parts, self._answers[index].finished)}
            | {"index": place}
            for place, index in enumerate(shown)
        ]
        return self._replies[0].together(choices, *self._usage(), self._answers[shown[0]].finished)

    def _best(self, first: int) -> Sequence[int]:
        """Return the indices of the `shown` answers of one prompt with the highest mean log-probability.
        first: the index of the prompt's first answer."""
        indices = range(first, first + self._each)
        if self._shown == self._each:
            return indices
        answers = self._answers
        means = {i: answers[i].logprob / max(1, answers[i].finished.usage.completion_tokens) for i in indices}
        return sorted(indices, key=lambda index: -means[index])[: self._shown]

    def chunks(self, event: RequestEvent) -> Iterable[Json]:
        assert isinstance(event, ChoiceEvent)
        yield from self._answers[event.index].chunks(event.event)
        ended = isinstance(event.event, GenerateFinished) and all(one.finish for one in self._answers)
        if ended and self._tells_usage:
            yield self._replies[0].usage_chunk(*self._usage())

    def fail(self, error: DeltafrontError) -> Iterable[Json]:
        return self._replies[0].fail(error)

    def _usage(self) -> tuple[Usage, int | None]:
        """Add up the usage and the reasoning tokens of all answers. A prompt counts once, however many
        answers it has."""
        usages = [one.finished.usage for one in self._answers]
        prompts = usages[:: self._each]
        total = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            host_tokens=sum(usage.host_tokens for usage in prompts),
            disk_tokens=sum(usage.disk_tokens for usage in prompts),
        )
        reasoned = [one.splitter.reasoning_tokens for one in self._answers]
        told = [tokens for tokens in reasoned if tokens is not None]
        return total, sum(told) if told else None
