"""Evaluation prompts with their right answers, as text, as token ids and in JSONL files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Words = Annotated[str, Field(min_length=1)]


class PromptError(ValueError):
    """A file of prompts is wrong. The message names file and line."""


@dataclass(frozen=True)
class TaskPrompt:
    """A document and the question that follows it.

    Attributes:
        task: The kind of task, such as RULER's `multikey_1`.
        source: The document's name. Prompts of one document are not independent.
        answers: All strings that a full answer contains. Empty: they are not known.
    """

    task: str
    source: str
    document: str
    question: str
    answers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.document + self.question

    def score(self, said: str) -> float:
        """Return the share of the right answers that the text `said` contains, in any case (RULER's
        string_match_all)."""
        return sum(answer.lower() in said.lower() for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Sample:
    """A tokenised prompt.

    Attributes:
        ids: Prefilled with the setting's method: the whole prompt, or a session's document.
        question: Appended to a session; empty if the question ends the prompt.
    """

    prompt: TaskPrompt
    ids: tuple[int, ...]
    question: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids) + len(self.question)


class PromptLine(BaseModel):
    """A line of a JSONL file: a `prompt`, or a `document` and a `question`. `answers` may be missing."""

    model_config = ConfigDict(extra="forbid")

    prompt: Words | None = None
    document: Words | None = None
    question: Words | None = None
    answers: tuple[Words, ...] = ()
    task: Words = "questions"
    id: Words | int | None = None

    @model_validator(mode="after")
    def _one_form(self) -> PromptLine:
        given = (self.prompt is not None, self.document is not None, self.question is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise ValueError("must have `prompt`, or `document` and `question`")
        return self


def read_prompts(path: Path) -> list[TaskPrompt]:
    """Read prompts from a JSONL file. Questions on equal documents get the same `source`. Raises
    PromptError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from None
    found = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise PromptError(f"{path}: has no line: give one JSON object on each")
    return list(_with_sources(path.stem, found))


def _prompt(path: Path, number: int, line: str) -> TaskPrompt:
    try:
        given = PromptLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "line"
        raise PromptError(f"{path}, line {number}: {where}: {first['msg']}") from None
    if given.document is None or given.question is None:
        return TaskPrompt(given.task, "", "", given.prompt or "", given.answers)
    question = given.question if given.question[0].isspace() else f"\n{given.question}"
    return TaskPrompt(given.task, "", given.document, question, given.answers)


def _with_sources(name: str, prompts: list[TaskPrompt]) -> Iterator[TaskPrompt]:
    numbers: dict[str, int] = {}
    for one in prompts:
        number = numbers.setdefault(one.document or one.question, len(numbers))
        yield TaskPrompt(one.task, f"{name}-{number}", one.document, one.question, one.answers)
