"""Checks tests' names and new commits' subjects by the rules of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_NAME, LONGEST_SUBJECT = 65, 72
SINCE = "4fe709c6"
"""Subjects after this commit are checked."""
_NO_BEHAVIOUR = re.compile(r"test_(of|what|where|whoever|whose|who|behind|as)_")
_NOT_IMPERATIVE = re.compile(r"(\w+: )?(\w+(ed|ing)|a|an|the|of|what|where)\b", re.IGNORECASE)
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_IMPERATIVE = ("bring", "embed", "feed", "need", "proceed", "seed", "shed", "speed", "string", "swing")


def refused(name: str) -> bool:
    return len(name) > LONGEST_NAME or bool(_NO_BEHAVIOUR.match(name))


def subject_problem(subject: str) -> str | None:
    """Return what is wrong with a commit's subject."""
    if len(subject) > LONGEST_SUBJECT:
        return f"{len(subject)} characters, at most {LONGEST_SUBJECT}"
    match = _NOT_IMPERATIVE.match(subject)
    if match and match[2].lower() not in _IMPERATIVE:
        return f"begins with {match[2]!r}: begin with a verb, as an order"
    return "ends with a full stop" if subject.endswith(".") else None


def test_names_say_behaviour_in_at_most_65_characters() -> None:
    trees = (ast.walk(ast.parse(path.read_text())) for path in (ROOT / "tests").rglob("test_*.py"))
    functions = (node for tree in trees for node in tree if isinstance(node, _FUNCTION))
    names = {node.name for node in functions if node.name.startswith("test_")}
    wrong = sorted(filter(refused, names))
    assert names and not wrong, (
        f"shorten them, and say what the code does ('refuses a prompt longer than …'): {wrong}"
    )


def test_new_subjects_are_short_and_imperative() -> None:
    command = ["git", "log", "--no-merges", "--format=%s", f"{SINCE}..HEAD"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if log.returncode:
        pytest.skip(f"no history since {SINCE} here: {log.stderr.strip()}")
    problems = {subject: subject_problem(subject) for subject in log.stdout.splitlines()}
    assert not (wrong := {subject: problem for subject, problem in problems.items() if problem}), wrong
