"""Tests RULER's tasks: the facts in the documents, the documents' length, and the seed."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from deltafront.benchmarks.accuracy import ruler
from deltafront.benchmarks.accuracy.questions import Answered, by_subject
from deltafront.benchmarks.accuracy.tasks import TASKS
from deltafront.workers.calibration.probes import Document, Question, Text

PROSE = "".join(f" Sentence number {i} tells a story, and it ends here." for i in range(900))
WORDS: dict[str, int] = {}


def encode_all(texts: Sequence[str]) -> list[list[int]]:
    """Make one token of each word with the space before it, of each digit, and of each other character."""
    pieces = (re.findall(r" ?[A-Za-z]+| ?\d|\s|[^\sA-Za-z\d]", text) for text in texts)
    return [[WORDS.setdefault(piece, len(WORDS)) for piece in found] for found in pieces]


def spelled(ids: Sequence[int]) -> str:
    pieces = {number: piece for piece, number in WORDS.items()}
    return "".join(pieces[token] for token in ids)


TEXT = Text(PROSE, encode_all)


def made(task: str, tokens: int = 4000, count: int = 3, seed: int = 0) -> Document:
    return TASKS[task](random.Random(f"{task} {seed}"), tokens, count, TEXT)  # type: ignore[arg-type]


def golds(questions: Sequence[Question]) -> list[str]:
    """Return the distinct right answers, in order."""
    return list(dict.fromkeys(spelled(question.gold).strip() for question in questions))


@pytest.mark.parametrize("task", ruler.TASKS)
def test_documents_have_the_given_length_and_depend_on_the_seed(task: str) -> None:
    documents = [made(task, seed=seed) for seed in range(12)]
    assert documents[0] == made(task)
    for document in documents:
        assert 0.9 * 4000 < len(document.ids) <= 4000
        assert document.questions
    answers = [set(golds(document.questions)) for document in documents]
    for at, mine in enumerate(answers):
        assert all(mine.isdisjoint(others) for others in answers[:at]), "seeds ask for different things"
    shapes = set[str]()
    for document in documents:
        prompt = spelled(document.questions[0].prompt)
        shapes.add(re.sub(r"\b[\w-]*\d[\w-]*\b|\b[a-z]+-[a-z]+\b", "", prompt).strip()[:24])
    assert len(shapes) == 3, shapes
    assert len(made(task, 9000).ids) > 8100


@pytest.mark.parametrize("task", ruler.TASKS)
def test_asks_for_answers_in_turn_and_accepts_any_remaining_one(task: str) -> None:
    document = made(task)
    turns: dict[str, list[Question]] = {}
    for question in document.questions:
        turns.setdefault(question.about, []).append(question)
    several = task not in [f"ruler_{kind}_{n}" for kind in ("single", "multikey") for n in (1, 2, 3)]
    if not several:
        assert all(len(each) == 1 for each in turns.values())
        return
    every = golds(document.questions)
    for turn, (about, each) in enumerate(turns.items()):
        assert about.endswith(f" {turn + 1}")
        assert golds(each) == every[turn:]
        assert len({question.prompt for question in each}) == 1
        said = "".join(f" {answer}," for answer in every[:turn])
        assert spelled(each[0].prompt).endswith(said) and not spelled(each[0].prompt).endswith(",,")
    # Two right answers in any order count as two, as with RULER's string match.
    answers = [
        Answered(-1.0, i in (1, len(every)), 0, -1.0) for i, _question in enumerate(document.questions)
    ]
    assert sum(exact for _, exact in by_subject(document.questions, answers).values()) == 2


def test_each_ruler_task_asks_its_number_of_questions() -> None:
    expected = {"multivalue": 4, "multiquery": 4, "variables": 5, "common_words": 10, "frequent_words": 3}
    for task, count in expected.items():
        assert len({question.about for question in made(f"ruler_{task}").questions}) == count


@pytest.mark.parametrize("number", [1, 2, 3])
def test_single_needle_appears_once(number: int) -> None:
    document = made(f"ruler_single_{number}")
    (question,) = document.questions
    text, kind = spelled(document.ids), "uuid" if number == 3 else "number"
    value = spelled(question.gold).strip()
    sentence = f"One of the special magic {kind}s for {question.about} is: {value}."
    assert text.count(sentence) == 1 and text.count(value) == 1 and text.count(question.about) == 1
    assert text.count("special magic") == 2, "the preface and the needle"
    assert question.about in spelled(question.prompt)
    assert ("The grass is green" in text) == (number == 1) and ("tells a story" in text) == (number != 1)
    assert len(value) == (36 if number == 3 else 7)


def test_each_of_many_keys_has_its_own_value() -> None:
    text_of = {name: made(f"ruler_multikey_{name}", count=4) for name in (1, 2, 3)}
    for name, document in text_of.items():
        text = spelled(document.ids)
        pairs = re.findall(r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.", text)
        assert len(document.questions) == 4
        assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == len(pairs)
        assert len(pairs) == 4 if name == 1 else len(pairs) > 40
        for question in document.questions:
            assert dict(pairs)[question.about] == spelled(question.gold).strip()
        if name > 1:
            assert not re.sub(r"One of the special .*\n", "", text).partition("\n")[2], "needles alone"
            assert (pairs[0][0].count("-") == 4) == (name == 3), "keys are uuids, too"


def test_ruler_asks_for_all_values_of_a_key_and_all_keys() -> None:
    document = made("ruler_multivalue")
    text, every = spelled(document.ids), golds(document.questions)
    (key,) = {question.about.rpartition(" ")[0] for question in document.questions}
    assert re.findall(rf"numbers for {key} is: (\d+)\.", text) == every and len(every) == ruler.VALUES
    document = made("ruler_multiquery")
    text, prompt = spelled(document.ids), spelled(document.questions[0].prompt)
    pairs = dict(re.findall(r"numbers for (\S+) is: (\d+)\.", text))
    assert sorted(golds(document.questions)) == sorted(pairs.values()) and len(pairs) == ruler.KEYS
    assert all(key in prompt for key in pairs)


def test_every_variable_of_a_chain_has_the_same_value() -> None:
    document = made("ruler_variables")
    text = spelled(document.ids)
    value = document.questions[0].about.partition(" ")[0]
    held = re.findall(rf"VAR ([A-Z]+) = {value}\.", text)
    for new, old in re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+)\.", text):
        assert old == held[-1]
        held.append(new)
    assert held == golds(document.questions) and len(held) == ruler.HOPS + 1


def test_common_words_occur_the_stated_number_of_times() -> None:
    document = made("ruler_common_words", 8000)
    lines = re.findall(r"\n(\d+)\. (\S+)", spelled(document.ids))
    assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    counted = Counter(word for _, word in lines).most_common()
    assert {word for word, _ in counted[: ruler.COMMON]} == set(golds(document.questions))
    assert {times for _, times in counted[: ruler.COMMON]} == {ruler.COMMON_TIMES}
    assert {times for _, times in counted[ruler.COMMON :]} == {ruler.OTHER_TIMES}
    with pytest.raises(ValueError, match="10 common words and another take more"):
        made("ruler_common_words", 900)


def test_frequent_words_occur_more_often_than_others() -> None:
    document = made("ruler_frequent_words", 8000)
    counted = Counter(re.findall(r"\S+", spelled(document.ids).partition("\n")[2])).most_common()
    assert counted[0][0] == "...." and len(counted) > 100
    assert [word for word, _ in counted[1:4]] == golds(document.questions)
    times = [count for _, count in counted]
    assert times[1] > times[2] > times[3] > times[4]
    assert times[1] == pytest.approx(times[0] / 4, rel=0.02) and times[3] == pytest.approx(
        times[0] / 16, rel=0.1
    )
    with pytest.raises(ValueError, match="do not stand out"):
        made("ruler_frequent_words", 60)
