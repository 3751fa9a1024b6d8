"""Splits an answer's text into reasoning, content and tool calls, for all protocols."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from deltafront.service.door.reasoning import ReasoningSplitter
from deltafront.service.request.answers import AnswerPart, CallPart
from deltafront.service.request.calls import Ending, GenerateRequest
from deltafront.service.request.handler import RequestHandler
from deltafront.service.request.text.harmony import HarmonyParser, opening_of
from deltafront.service.request.text.thoughts import is_open
from deltafront.service.request.text.tool_calls import ToolCallParser, random_id


class AnswerSplitter:
    """Splits a streamed answer.

    Args:
        reasoning: None: all text is content.
        calls: None: the answer may not call tools.
        channels: The parser of gpt-oss's channels, which does all.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None = None,
        calls: ToolCallParser | None = None,
        channels: HarmonyParser | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._channels = channels
        self._taken = self._said = 0  # characters of the answer, and of content returned
        self._before: int | None = None
        self._places = deque[int](maxlen=0)  # keeps nothing until somebody asks

    def note_places(self) -> deque[int]:
        """Return a queue that gets the position in the answer's text of each content returned from now on."""
        self._places = deque()
        if self._channels is not None:
            self._channels.places = self._places
        return self._places

    @property
    def called(self) -> bool:
        """True if the answer calls tools, and no call is cut off."""
        caller = self._channels or self._calls
        return caller is not None and caller.calls > 0 and caller.ended

    @property
    def cut_off(self) -> bool:
        """True if the answer so far ends within a call's arguments."""
        caller = self._channels or self._calls
        return caller is not None and not caller.ended

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None if reasoning is not separated from content."""
        reasoner = self._channels or self._reasoning
        return None if reasoner is None else reasoner.tokens

    def push(self, text: str, tokens: int, last: bool = False) -> list[AnswerPart]:
        """Split the next text. The result is empty while the text is held back.

        Args:
            tokens: Tokens of the answer so far, including this text.
            last: True if this text ends the answer.
        """
        if self._channels is not None:
            return self._channels.push(text, tokens, last)
        self._taken += len(text)
        parts = [AnswerPart(content=text)]
        if self._reasoning is not None:
            parts = [self._reasoning.push(text, tokens), *([self._reasoning.flush()] if last else [])]
        content = sum(len(part.content) for part in parts)  # the end of the answer so far
        if content and self._before is None:
            self._before = self._taken - content
        if self._calls is not None:
            parts = [found for part in parts for found in _with_calls(self._calls, part)]
            parts += [AnswerPart(content=rest) for rest in (self._calls.flush() if last else ())]
        for part in parts:
            if part.content and self._before is not None:  # calls come last, so content has no gap
                self._places.append(self._before + self._said)
                self._said += len(part.content)
        return [part for part in parts if any(part)]


def reasoning_first(request: GenerateRequest) -> GenerateRequest:
    """If the prompt is messages, return the request with reasoning permitted before its constraint
    applies."""
    prompts = {
        name: replace(prompt, reasons=prompt.messages is not None)
        for name in ("prompt", "append")
        if (prompt := getattr(request, name)) is not None
    }
    return replace(request, **prompts)


async def answer_splitters(
    requests: RequestHandler,
    request: GenerateRequest,
    size: int,
    *,
    reasoning: bool,
    answers: int = 1,
    new_id: Callable[[int], str] = random_id,
) -> list[AnswerSplitter]:
    """Make the splitter of each answer of a request.

    Args:
        size: Bytes of the request.
        reasoning: True to separate reasoning from content.
        new_id: Makes the id of a tool call from its index.
    """
    opening: str | None = None  # the text with which the chat template begins the answer
    if reasoning:
        opening = await requests.text_budget.work(size, lambda _: requests.generation_prompt(request))
    form, tools, asked = requests.tool_format, request.tools, request.append or request.prompt
    if opening is not None and requests.is_harmony and asked is not None and asked.reasons:
        begun = opening_of(opening, continued=asked.ending is Ending.OPEN)
        return [
            AnswerSplitter(channels=HarmonyParser(begun, tools is not None, new_id)) for _ in range(answers)
        ]
    return [
        AnswerSplitter(
            None if opening is None else ReasoningSplitter(is_open(opening), trims=request.has_form),
            None if form is None or tools is None else ToolCallParser(form, tools, new_id),
        )
        for _ in range(answers)
    ]


def _with_calls(calls: ToolCallParser, part: AnswerPart) -> list[AnswerPart]:
    found = [AnswerPart(reasoning=part.reasoning)]
    for piece in calls.push(part.content):
        if isinstance(piece, CallPart):
            found.append(AnswerPart(calls=(piece,)))
        else:
            found.append(AnswerPart(content=piece))
    return found
