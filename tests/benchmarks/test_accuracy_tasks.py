"""Tests the documents of the accuracy benchmark: their length, content and dependence on the seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest

from deltafront.benchmarks.accuracy.tasks import COPIED, CUE, NAMES_CONTINUED, NEAR, TASKS, copied, named
from deltafront.benchmarks.reader import SpelledText
from deltafront.workers.calibration import needles as hay
from deltafront.workers.calibration.probes import VALUES, Document

PROSE = "".join(f" Sentence number {i} tells a story, and it ends here." for i in range(300))
WORDS: dict[str, int] = {}


def encode_all(texts: Sequence[str]) -> list[list[int]]:
    """Make one token of each word and the space before it, and of each other character."""
    found = []
    for text in texts:
        words = [" " + word for word in text.split(" ")]
        words[0] = words[0][1:]
        found.append([WORDS.setdefault(word, len(WORDS)) for word in words if word])
    return found


def decoded(ids: Sequence[int]) -> str:
    words = {number: word for word, number in WORDS.items()}
    return "".join(words[token] for token in ids)


def spell(ids: Sequence[int]) -> list[str]:
    words = {number: word for word, number in WORDS.items()}
    return [words[token] for token in ids]


TEXT = SpelledText(PROSE, encode_all, spell)


def made(task: str, tokens: int, count: int, seed: int = 0) -> Document:
    return TASKS[task](random.Random(seed), tokens, count, TEXT)


@pytest.mark.parametrize("task", ["needles", "values", "chains", "prose"])
def test_documents_have_the_given_length_and_depend_on_the_seed(task: str) -> None:
    first, again, other = made(task, 1000, 5), made(task, 1000, 5), made(task, 1000, 5, seed=1)
    assert len(first.ids) == 1000
    assert first == again
    assert first.ids != other.ids


def test_document_contains_every_needle_that_a_question_asks_for() -> None:
    document = made("needles", 1500, 60)
    text = decoded(document.ids)
    assert len({question.about for question in document.questions}) == 60
    for question in document.questions:
        value = decoded(question.gold).strip()
        assert f"s for {question.about} is: {value}." in text
        assert decoded(question.prompt).endswith("mentioned in the provided text is")


def test_asks_for_several_values_of_one_key() -> None:
    document = made("values", 1000, 3)
    text = decoded(document.ids)
    assert len(document.questions) == 3 * VALUES
    assert len({question.about for question in document.questions}) == 3
    for question in document.questions:
        assert f"numbers for {question.about} is: {decoded(question.gold).strip()}." in text


def test_documents_contain_the_links_of_a_chain_in_order() -> None:
    document = made("chains", 1000, 4)
    text = decoded(document.ids)
    assert len(document.questions) == 4 * VALUES
    for question in document.questions:
        link = decoded(question.prompt)[1:] + decoded(question.gold) + "."
        old = decoded(question.gold).strip()
        assert text.index(f"VAR {old} =") < text.index(link)


def test_haystack_documents_contain_only_needles() -> None:
    document = made("haystack", 1200, 20)
    lines = decoded(document.ids).strip().split("\n")
    assert 1200 - len(document.ids) < 12
    assert all(line.startswith("One of the special magic") for line in lines)
    assert len(document.questions) == 20


def test_refuses_too_short_texts_and_too_many_facts() -> None:
    with pytest.raises(ValueError, match="too short"):
        made("prose", 100_000, 0)
    with pytest.raises(ValueError, match="60 facts take"):
        made("needles", 100, 60)


def test_refuses_tokenizers_that_join_question_and_answer() -> None:
    joined = SpelledText(PROSE, lambda texts: [[hash(text) % 997] for text in texts], spell)
    with pytest.raises(ValueError, match="joins"):
        TASKS["needles"](random.Random(0), 300, 2, joined)


def test_needle_keys_are_unique_and_stable_across_versions() -> None:
    keys = {needle.key for needle in hay.make_needles(5000, 1)}
    assert len(keys) == 5000
    words = [word for needle in hay.make_needles(102, 1) for word in needle.key.split("-")]
    assert len(set(words)) == 204
    known = hashlib.md5(repr(hay.make_needles(100, 3)).encode()).hexdigest()
    assert known == "30c5bee0ca77fc4dc3a9b29f2bd16444"
    with pytest.raises(ValueError, match="at most 10404 needles"):
        hay.make_needles(10_405, 1)


def test_copy_questions_repeat_only_distant_text() -> None:
    """The expected copies are found by brute force, on ids with many repetitions."""
    rng = random.Random(4)
    phrases = [[rng.randrange(50) for _ in range(9)] for _ in range(30)]
    found = 0
    for seed in range(12):
        order = random.Random(seed)
        ids = [token for _ in range(260) for token in phrases[order.randrange(30)]]
        ids += [order.randrange(50, 99) for _ in range(NEAR - 200)]
        tokens = len(ids)
        ids += [token for _ in range(30) for token in phrases[order.randrange(30)]]
        places = list(copied(ids, tokens))
        expected, after = [], tokens + CUE
        for at in range(tokens + CUE, len(ids) - COPIED + 1):
            said = ids[at - CUE : at + COPIED]
            width = len(said)
            before = [a for a in range(at - CUE) if ids[a : a + width] == said]
            far = [a for a in before if a + width <= tokens - NEAR]
            near = [a for a in before if a >= tokens - NEAR]
            if at >= after and far and not near:
                expected.append(at)
                after = at + COPIED
        assert places == expected
        found += len(places)
    assert found > 40


def test_a_copy_question_ends_with_the_tokens_before_the_copy() -> None:
    sentences = "".join(
        f" The {i % 90} men of house {i % 90} went to town {i % 90} that day." for i in range(260)
    )
    text = SpelledText(sentences, encode_all, spell)
    document = TASKS["copies"](random.Random(3), 2500, 8, text)
    assert len(document.ids) == 2500 and 0 < len(document.questions) <= 8
    for question in document.questions:
        assert len(question.gold) == COPIED and len(question.prompt) >= CUE
        said = [*question.prompt[-CUE:], *question.gold]
        assert any(document.ids[a : a + len(said)] == said for a in range(2500 - NEAR))


def test_name_questions_ask_for_distant_names_of_several_tokens() -> None:
    far = [" said", " Othel", "lo", " and", " Yor", "ick", " and", " Iago", ".", "Cass", "io", " Yonder"]
    near, filler = [" Yor", "ick"], [" so"] * NEAR
    behind = ["\n", "Othel", "lo", " to", " Othel", "lo", " Iago", " Cass", "io", " Yor", "ick"]
    behind += [" Cass", "ia", " yon", "der", " Yon", "der", " Now", "."]
    spelled = [*far, *filler[: NEAR - len(near)], *near, *behind]
    tokens = len(far) + NEAR
    found = ["".join(spelled[a:b]) for a, b in named(spelled, tokens)]
    # Not asked for: Iago (one token), Yorick and the second Othello (near), Yonder (also in lower case).
    assert found == ["Othello", " Cassio"]


def test_a_name_question_ends_with_the_names_first_token() -> None:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        """Split each word into two tokens, like rare words."""
        found = []
        for text in texts:
            words = [" " + word for word in text.split(" ")]
            words[0] = words[0][1:]
            parts = [part for word in words for part in (word[:3], word[3:]) if part]
            found.append([WORDS.setdefault(part, len(WORDS)) for part in parts])
        return found

    people = [f"{chr(65 + i)}{chr(97 + j)}mund" for i in range(26) for j in range(26)]
    order = random.Random(1)
    # Each name occurs twice, about 500 sentences apart, so most names are distant.
    said = [*order.sample(people, 500), *order.sample(people, 500)]
    text = SpelledText("".join(f" There came {name} today." for name in said), encode, spell)
    document = TASKS["names"](random.Random(2), 3600, 6, text)
    assert len(document.ids) == 3600 and 0 < len(document.questions) <= 6
    far = "".join(spell(document.ids[: 3600 - NEAR]))
    for question in document.questions:
        assert len(question.prompt) <= NAMES_CONTINUED
        name = "".join(spell(question.prompt[-1:] + question.gold)).strip()
        assert name in people and name in far
