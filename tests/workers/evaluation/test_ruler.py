"""RULER's tasks in its own wording, and files of prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deltafront.workers.evaluation.prompts import (
    PromptError,
    TaskPrompt,
    read_prompts,
)
from deltafront.workers.evaluation.ruler import TASKS, Haystack, make_prompt

PROSE = Haystack("prose", " ".join(f"Sentence {n} tells of nothing." for n in range(200)))
WORD, NUMBER, UUID = r"[a-z]+-[a-z]+", r"\d{7}", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

# The templates of RULER's generator (github.com/NVIDIA/RULER, scripts/data/synthetic/constants.py), with its
# singular where one value is asked for, and its misspelling.
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for "
    "{query} mentioned in the provided text? The special magic {kind} for {query} mentioned in the "
    "provided text is"
)
MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind}s afterwards.\n{context}\nWhat are all the special magic "
    "{kind}s for {query} mentioned in the provided text? The special magic {kind}s for {query} "
    "mentioned in the provided text are"
)
TRACED = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text "
    "above. Answer: According to the chain(s) of variable assignment in the text above, 5 "
    "variables are assgined the value {query}, they are:"
)
LISTED = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list? Answer: The top 10 words that appear most often in the list are:"
)
CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text? Answer: According to the coded text above, the three most frequently appeared words are:"
)
QUERIES = {
    "multiquery": rf"(?P<query>{WORD}, {WORD}, {WORD}, and {WORD})",
    "multikey_3": f"(?P<query>{UUID})",
}
WORDINGS = {
    "single_1": (ONE, "number"),
    "single_2": (ONE, "number"),
    "single_3": (ONE, "uuid"),
    "multikey_1": (ONE, "number"),
    "multikey_2": (ONE, "number"),
    "multikey_3": (ONE, "uuid"),
    "multivalue": (MANY, "number"),
    "multiquery": (MANY, "number"),
    "variables": (TRACED, "number"),
    "common_words": (LISTED, ""),
    "frequent_words": (CODED, ""),
}


def count(text: str) -> int:
    return len(text.split())


def prompt_of(task: str, seed: str = "0", tokens: int = 2400) -> TaskPrompt:
    return make_prompt(task, seed, tokens, PROSE, count)


@pytest.mark.parametrize("task", WORDINGS)
def test_prompt_has_the_wording_of_rulers_template(task: str) -> None:
    template, kind = WORDINGS[task]
    before, _, after = (re.escape(part) for part in template.partition("{context}"))
    query = QUERIES.get(task, r"(?P<query>\d{5})" if task == "variables" else f"(?P<query>{WORD})")
    for at in (before, after):
        assert "context" not in at
    pattern = f"{before}.*{after}".replace(r"\{kind\}", kind).replace(r"\{query\}", query, 1)
    pattern = pattern.replace(r"\{query\}", "(?P=query)")
    assert re.fullmatch(pattern, prompt_of(task).text, re.DOTALL)


@pytest.mark.parametrize("task", TASKS)
def test_prompt_holds_its_answers_and_fills_its_tokens(task: str) -> None:
    made = prompt_of(task)
    expected = {"multivalue": 4, "multiquery": 4, "variables": 5, "common_words": 10, "frequent_words": 3}
    assert len(made.answers) == len(set(made.answers)) == expected.get(task, 1)
    assert all(answer in made.document for answer in made.answers)
    assert 0.95 * 2400 < count(made.text) <= 2400
    assert made == prompt_of(task) and made.answers != prompt_of(task, "1").answers
    assert made.score(" and ".join(made.answers)) == 1.0 and made.score("none") == 0.0


@pytest.mark.parametrize(
    ("task", "key", "value", "least"),
    [
        ("single_1", WORD, NUMBER, 1),
        ("multikey_1", WORD, NUMBER, 4),
        ("multikey_2", WORD, NUMBER, 100),
        ("multikey_3", UUID, UUID, 100),
        ("multivalue", WORD, NUMBER, 4),
    ],
)
def test_needles_are_worded_as_in_ruler(task: str, key: str, value: str, least: int) -> None:
    made = prompt_of(task)
    kind = "uuid" if value == UUID else "number"
    found = re.findall(f"One of the special magic {kind}s for ({key}) is: ({value})\\.", made.document)
    assert len(found) >= least and set(made.answers) <= {value for _, value in found}
    asked = [value for key, value in found if key in made.question]
    assert sorted(asked) == sorted(made.answers)


def test_chain_of_variables_ends_in_the_value_asked_for() -> None:
    made = prompt_of("variables")
    text = made.document.rpartition("Memorize and track")[2]
    names = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})", text))
    value = re.search(r"\d{5}", made.question)
    assert value is not None and set(names) == set(made.answers)
    for found in made.answers:
        while found in names:
            found = names[found]  # noqa: PLW2901
        assert found == value[0]


def test_answers_of_word_tasks_are_the_most_frequent_words() -> None:
    common = prompt_of("common_words")
    words = re.findall(r"\d+\. (\S+)", common.document)
    assert {word for word in words if words.count(word) == 30} == set(common.answers)
    assert {words.count(word) for word in words} == {3, 30}
    frequent = prompt_of("frequent_words")
    coded = frequent.document.split()
    ranked = sorted(set(coded) - {"..."}, key=coded.count)[-4:]
    assert set(ranked[1:]) >= set(frequent.answers) and coded.count("...") > coded.count(ranked[-1])


def test_refuses_a_prompt_too_short_for_its_facts() -> None:
    with pytest.raises(ValueError, match="task multiquery: its shortest prompt has"):
        prompt_of("multiquery", tokens=50)


def test_reads_a_file_of_prompts_without_documents(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    made = [prompt_of("single_1"), prompt_of("multivalue")]
    lines = [{"id": "n", "task": one.task, "prompt": one.text, "answers": one.answers} for one in made]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    read = read_prompts(file)
    assert [(one.task, one.text, one.answers) for one in read] == [
        (one.task, one.text, one.answers) for one in made
    ]
    assert [one.source for one in read] == ["own-0", "own-1"]


def test_questions_on_one_document_share_a_source(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(
        '{"document": "All is well.", "question": "Is it?", "answers": ["yes"]}\n\n'
        '{"document": "All is well.", "question": "\\nWhy?"}\n{"prompt": "Tell.", "id": 7}\n'
    )
    first, second, third = read_prompts(file)
    assert (first.text, second.text) == ("All is well.\nIs it?", "All is well.\nWhy?")
    assert first.source == second.source != third.source
    assert (first.answers, second.answers, third.document) == (("yes",), (), "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: line: Invalid JSON"),
        ('{"document": "a"}', "line 1: line: .*must have `prompt`, or `document` and `question`"),
        ('{"prompt": "a", "answer": ["b"]}', "line 1: answer: Extra inputs"),
        ("", "has no line: give one JSON object on each"),
    ],
)
def test_refuses_a_file_of_prompts_with_a_wrong_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(line)
    with pytest.raises(PromptError, match=message):
        read_prompts(file)
