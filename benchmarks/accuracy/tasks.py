"""Documents with questions whose answers stand in them, as token ids; and prose without questions.

Each task is a function of a seeded generator, the tokens wanted, the number of things hidden and the text
they are hidden in. The kinds are RULER's (Hsieh et al. 2024): single and multi-key needles, several values
for one key, variable chains; in forms that a small model answers, so that dense attention does not fail by
itself: SmolLM2-135M does not list all values of a key or all variables of a chain, so any one value is
right, and a chain is asked for link by link.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltafront.benchmarks import needles as hay

Item = TypeVar("Item")
EncodeAll = Callable[[Sequence[str]], list[list[int]]]
"""The token ids of each text, without special tokens."""

VALUES = 4
"""Numbers of one key in `values`, assignments from variable to variable of one chain in `chains`."""


@dataclass(frozen=True)
class Question:
    """What is appended to the document, and the answer that is right. Several questions about the same are
    one that has several right answers."""

    about: str
    prompt: tuple[int, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    ids: list[int]
    questions: list[Question]


class Text:
    """A text cut before the white space after each sentence, where tokens do not reach across."""

    def __init__(self, text: str, encode_all: EncodeAll) -> None:
        cuts = [match.start() for match in re.finditer(r"(?<=[.!?])\s", text)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]
        self.sentences = encode_all(pieces)
        self.encode_all = encode_all

    def take(self, rng: random.Random, tokens: int) -> list[list[int]]:
        """Sentences from a random place on, of `tokens` tokens together; the last one is cut.

        Raises ValueError if the text is too short.
        """
        left, last_start = tokens, len(self.sentences)
        while left > 0 and last_start > 0:
            last_start -= 1
            left -= len(self.sentences[last_start])
        if left > 0:
            raise ValueError(f"the text is too short: it has {tokens - left} tokens, {tokens} are needed")
        start, taken, missing = rng.randint(0, last_start), [], tokens
        for sentence in self.sentences[start:]:
            if missing <= 0:
                break
            taken.append(sentence[:missing])
            missing -= len(taken[-1])
        return taken


Task = Callable[[random.Random, int, int, Text], Document]


def prose(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Nothing hidden and nothing asked: for the perplexity of the document's tail."""
    del count
    return Document(_joined(text.take(rng, tokens)), [])


def needles(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """`count` needles in text, all asked for."""
    found = hay.make_needles(count, rng.getrandbits(32))
    ids = _hidden(rng, tokens, [needle.sentence for needle in rng.sample(found, count)], text)
    return Document(ids, _asked([(n.key, n.question, f" {n.value}") for n in found], text))


def haystack(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Needles and nothing else, one a line, as many as fit; `count` of them asked for."""
    every = hay.make_needles(min(10_000, tokens // 10), rng.getrandbits(32))
    rng.shuffle(every)
    ids: list[int] = []
    fitting = []
    for needle, line in zip(every, text.encode_all([f"{n.sentence}\n" for n in every]), strict=True):
        if len(ids) + len(line) > tokens:
            break
        ids += line
        fitting.append(needle)
    asked = rng.sample(fitting, min(count, len(fitting)))
    return Document(ids, _asked([(n.key, n.question, f" {n.value}") for n in asked], text))


def values(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """`count` keys of several numbers each, in text. Any of a key's numbers is a right answer."""
    found = hay.make_needles(count, rng.getrandbits(32))
    keyed = [[(n.key, str(rng.randint(1_000_000, 9_999_999))) for _ in range(VALUES)] for n in found]
    hidden = [hay.Needle(key, number, "number") for key, number in _mixed(rng, keyed)]
    ids = _hidden(rng, tokens, [needle.sentence for needle in hidden], text)
    return Document(ids, _asked([(n.key, n.question, f" {n.value}") for n in hidden], text))


def chains(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """`count` chains of assignments from variable to variable; each assignment is asked for."""
    names = set[str]()
    while len(names) < count * (VALUES + 1):
        names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
    order, facts, asked = rng.sample(sorted(names), len(names)), [], []
    for first, value in enumerate(rng.sample(range(10_000, 100_000), count)):
        chain = order[first * (VALUES + 1) : (first + 1) * (VALUES + 1)]
        links = list(itertools.pairwise(chain))
        facts.append([f"VAR {chain[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in links)])
        asked += [(new, f"\nVAR {new} = VAR", f" {old}") for old, new in links]
    return Document(_hidden(rng, tokens, _mixed(rng, facts), text), _asked(asked, text))


TASKS: Mapping[str, Task] = {
    "needles": needles,
    "haystack": haystack,
    "values": values,
    "chains": chains,
    "prose": prose,
}


def _hidden(rng: random.Random, tokens: int, facts: Sequence[str], text: Text) -> list[int]:
    """Text with each fact after a sentence, in order, evenly spread with jitter; `tokens` tokens in all."""
    encoded = text.encode_all([f" {fact}" for fact in facts])
    room = tokens - sum(map(len, encoded))
    if room < 0:
        raise ValueError(f"{len(facts)} facts take {tokens - room} tokens of a document of {tokens}")
    sentences = text.take(rng, room)
    share = len(sentences) / max(1, len(facts))
    pieces, last = list[list[int]](), 0
    for i, fact in enumerate(encoded):
        place = max(last, int((i + rng.random()) * share))
        pieces += [*sentences[last:place], fact]
        last = place
    return _joined([*pieces, *sentences[last:]])


def _asked(asked: Iterable[tuple[str, str, str]], text: Text) -> list[Question]:
    """Questions from (about, prompt, answer with the space before it). No token may reach from one to the
    other: ValueError where the tokenizer makes one."""
    known = list(asked)
    prompts = text.encode_all([prompt for _, prompt, _ in known])
    wholes = text.encode_all([prompt + answer for _, prompt, answer in known])
    questions = []
    for (about, _, answer), prompt, whole in zip(known, prompts, wholes, strict=True):
        if whole[: len(prompt)] != prompt:
            raise ValueError(f"the tokenizer joins the question about {about} and its answer {answer!r}")
        questions.append(Question(about, tuple(prompt), tuple(whole[len(prompt) :])))
    return questions


def _mixed(rng: random.Random, lists: Sequence[Sequence[Item]]) -> list[Item]:
    """The lists' items in random order, those of one list in theirs."""
    turns = [which for which, items in enumerate(lists) for _ in items]
    rng.shuffle(turns)
    left = [iter(items) for items in lists]
    return [next(left[which]) for which in turns]


def _joined(pieces: Iterable[Sequence[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]
