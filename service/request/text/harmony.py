"""gpt-oss's format of answers, harmony: messages in channels, each `<|channel|>NAME<|message|>TEXT<|end|>`.

Channel `analysis` is reasoning, `final` the answer. A message `to=functions.NAME` calls a tool with JSON. The
markers are special tokens, which plain text cannot produce.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deltafront.service.request.answers import AnswerPart, CallPart
from deltafront.service.request.calls import Tools
from deltafront.service.request.text.detokenize import overlap
from deltafront.service.request.text.tool_calls import LENIENT, JsonEnd, random_id

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = "<|end|>", "<|call|>", "<|return|>", _START
MARKS = (_CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""The header of an answer's text."""
_CALLED = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_HEADERS = "assistant", " to=", _CHANNEL, _MESSAGE, *_ENDS
"""The possible beginnings of a header."""
_ANSWER = "answer"


def opening_of(prompt: str, continued: bool) -> str:
    """Return `HarmonyParser`'s opening.

    Args:
        prompt: The text that the chat template writes before the answer.
        continued: True if the answer continues the last message's text.
    """
    return FINAL if continued else prompt[prompt.rfind(_START) :] if _START in prompt else ""


def harmony_grammar(tools: Tools | None, answer: str | None, special: Mapping[str, int]) -> str:
    """Make the grammar of an answer: thoughts, and then a call or the answer's text.

    Args:
        answer: The grammar of the answer's text; None: it is free.
        special: The markers' ids.
    """
    start, channel, message, end = (f"<[{special[one]}]>" for one in (_START, _CHANNEL, _MESSAGE, "<|end|>"))
    chosen = [] if tools is None else _chosen(tools)
    last = ["final"] if tools is None or tools.choice == "auto" else []
    last += [f"call_{number}" for number in range(len(chosen))]
    rules = [
        "%llguidance {}",
        f"start: thought* ({' | '.join(last)})",
        f'thought: {channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
        f'final: {channel} "final" {message} {"TEXT" if answer is None else f"@{_ANSWER}"}',
        r"TEXT: /(.|\n)*/",
        f'json: " "? (<[{special[_CONSTRAIN]}]>? "json")? {message}',
    ]
    for number, function in enumerate(chosen):
        to = json.dumps(f"to=functions.{function['name']}")
        schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": LENIENT}
        rules += [
            f'call_{number}: ({channel} "commentary " {to} | " " {to} {channel} "commentary") json'
            f" %json {json.dumps(schema)}",
        ]
    whole: list[dict[str, Any]] = [{"lark_grammar": "\n".join(rules)}]
    if answer is not None and last[0] == "final":
        parts = [{"lark_grammar": answer}]
        if answer.startswith("{"):  # llguidance's JSON, whose first grammar is where it begins
            parts = json.loads(answer)["grammars"]
        parts[0]["name"] = _ANSWER
        whole += parts
    return json.dumps({"grammars": whole})


def _chosen(tools: Tools) -> Sequence[Mapping[str, Any]]:
    return [one for one in tools.functions if tools.choice in ("auto", "required", one["name"])]


class HarmonyParser:
    """Splits a streamed answer into reasoning, content and tool calls.

    Args:
        opening: The text that the prompt ends with, from the answer's `<|start|>` on.
        may_call: True if the answer may call tools. Otherwise calls are reasoning.
        new_id: Makes the id of a tool call from its index.

    Attributes:
        calls: Number of calls that have begun.
        tokens: Tokens of the answer up to the end of its reasoning; 0 without reasoning.
        places: Gets the position in the answer's text of each content that is returned.
    """

    def __init__(self, opening: str, may_call: bool, new_id: Callable[[int], str] = random_id) -> None:
        self._may_call, self._new_id = may_call, new_id
        self._held = ""
        self._header: str | None = ""
        """The header so far; None inside a message's text."""
        self._kind = "content"
        self._arguments: JsonEnd | None = None
        self.calls = self.tokens = 0
        self.places = deque[int](maxlen=0)
        self._taken = -len(opening)
        self.push(opening, 0)

    @property
    def ended(self) -> bool:
        """True if the arguments of the last call are complete, or no call has begun."""
        return self._arguments is None or self._arguments.ended

    def push(self, text: str, tokens: int, last: bool = False) -> list[AnswerPart]:
        """Split the next text.

        Args:
            tokens: Tokens of the answer so far, including this text.
            last: True if this text ends the answer.
        """
        self._held += text
        self._taken += len(text)
        parts = list[AnswerPart]()
        while (part := self._next(last)) is not None:
            parts.append(part)
        if any(part.reasoning for part in parts):
            self.tokens = tokens
        return [part for part in parts if any(part)]

    def _next(self, last: bool) -> AnswerPart | None:
        return self._next_of_header() if self._header is not None else self._next_of_text(last)

    def _next_of_header(self) -> AnswerPart | None:
        header, found, rest = self._held.partition(_MESSAGE)
        if found:
            self._held, self._header = rest, None
            return self._begun(header)
        begun = header.removeprefix(_START).removeprefix("assistant")
        if any(one.startswith(begun[: len(one)]) for one in _HEADERS):
            return None
        self._held, self._header, self._kind = begun, None, "content"  # text without a header
        return AnswerPart()

    def _begun(self, header: str) -> AnswerPart:
        channel = header.partition(_CHANNEL)[2].lstrip()
        called, self._arguments = _CALLED.search(header), None
        self._kind = "content" if channel.startswith(("final", "commentary")) else "reasoning"
        if "to=" in header:
            self._kind = "reasoning"
        if called is None or not self._may_call:
            return AnswerPart()
        index, self._arguments, self.calls = self.calls, JsonEnd(), self.calls + 1
        return AnswerPart(calls=(CallPart(index, self._new_id(index), called[1]),))

    def _next_of_text(self, last: bool) -> AnswerPart | None:
        ends = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        if ends:
            place, end = min(ends)
            text, self._held = self._held[:place], self._held[place:]
            if not text:
                self._held, self._header = self._held.removeprefix(end), ""
        else:
            keep = 0 if last else max(overlap(self._held, end) for end in _ENDS)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if not text:
                return None
        return self._part(text)

    def _part(self, text: str) -> AnswerPart:
        if self._arguments is None:
            if self._kind == "reasoning":
                return AnswerPart(reasoning=text)
            if text:
                self.places.append(self._taken - len(self._held) - len(text))
            return AnswerPart(content=text)
        taken = "" if self._arguments.ended else self._arguments.read(text)[0]
        return AnswerPart(calls=(CallPart(self.calls - 1, arguments=taken),)) if taken else AnswerPart()
