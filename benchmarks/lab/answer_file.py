"""Keeps a run's answers on disk, so that a run which was stopped continues where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from deltafront.workers.evaluation.comparison import MeasuredAnswer


class AnswerFileError(ValueError):
    """The file holds answers of another run. The message names the file and what differs."""


class AnswerFile:
    """Answers by setting, to the first samples of a run. Each group is appended to a JSONL file at once.

    Args:
        path: None: nothing is written.
        run: Describes the run. It is the file's first line; a file of another run is refused.
    """

    def __init__(self, path: Path | None, run: Mapping[str, object]) -> None:
        self._path, self._answers = path, dict[str, list[MeasuredAnswer]]()
        if path is None:
            return
        described = json.loads(json.dumps(run))
        lines = _whole_lines(path) if path.exists() else []
        if lines:
            _check(path, json.loads(lines[0]), described)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(described) + "\n", encoding="utf-8")
        for line in map(json.loads, lines[1:]):
            self._put(line["setting"], line["first"], [_answer(each) for each in line["answers"]])

    @property
    def settings(self) -> list[str]:
        return list(self._answers)

    def of(self, setting: str) -> list[MeasuredAnswer]:
        return self._answers.get(setting, [])

    def add(self, setting: str, first: int, answers: Sequence[MeasuredAnswer]) -> None:
        """Add answers to the samples from number `first` on, in place of any that are known."""
        self._put(setting, first, answers)
        if self._path is not None:
            line = {"setting": setting, "first": first, "answers": [asdict(one) for one in answers]}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _put(self, setting: str, first: int, answers: Sequence[MeasuredAnswer]) -> None:
        self._answers.setdefault(setting, [])[first:] = answers


def _whole_lines(path: Path) -> list[bytes]:
    """Cut off a last line that a stopped run began, and return the others."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    with path.open("r+b") as file:
        file.truncate(len(whole))
    return whole.splitlines()


def _answer(fields: Mapping[str, object]) -> MeasuredAnswer:
    return MeasuredAnswer(**{**fields, "ids": tuple(fields["ids"])})  # type: ignore[arg-type]


def _check(path: Path, found: Mapping[str, object], run: Mapping[str, object]) -> None:
    differing = sorted(key for key in {*found, *run} if found.get(key) != run.get(key))
    if differing:
        words = ", ".join(f"{key} is {found.get(key)} there and {run.get(key)} here" for key in differing)
        raise AnswerFileError(f"{path} has another run's answers: {words}: name another --result")
