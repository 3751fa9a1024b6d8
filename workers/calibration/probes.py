"""Makes documents with questions and answers, as token ids. It imports no torch.

The tasks are RULER's (Hsieh et al. 2024): needles, several values per key, variable tracking. They are easier
here, since SmolLM2-135M cannot list all values or variables: any value of a key is a right answer, and each
link of a chain is a separate question.
"""

import random
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from deltafront.workers.calibration import needles as hay

EncodeAll = Callable[[Sequence[str]], list[list[int]]]
"""Token ids of each text, without special tokens."""
Item = TypeVar("Item")
VALUES = 4
"""Number of values of a key, and of links in a chain of assignments."""
ANSWER_WEIGHT = 2.0
"""Default weight of the divergence on answers, relative to that on the document's tail."""


@dataclass(frozen=True)
class Question:
    about: str
    prompt: tuple[int, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    """A document and its questions. `facts` are the positions of the facts, ascending; empty if unknown."""

    ids: list[int]
    questions: list[Question]
    facts: Sequence[range] = ()


class Text:
    """A tokenised text in sentences. It is cut at white space, so that no token spans a cut."""

    def __init__(self, text: str, encode_all: EncodeAll) -> None:
        cuts = [match.start() for match in re.finditer(r"(?<=[.!?])\s", text)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]
        self.sentences = encode_all(pieces)
        self.encode_all = encode_all

    def take(self, rng: random.Random, tokens: int) -> list[list[int]]:
        """Return consecutive sentences with `tokens` tokens in all, from a random start. Raises ValueError if
        the text is shorter."""
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


def needles(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    made = hay.make_needles(count, rng.getrandbits(32))
    ids, facts = hidden_in(rng, tokens, [needle.sentence for needle in rng.sample(made, count)], text)
    return Document(ids, questions_of([(n.key, n.question, f" {n.value}") for n in made], text), facts)


def haystack(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Make a document that consists only of needles, one per line. Its questions ask for `count` needles."""
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
    return Document(ids, questions_of([(n.key, n.question, f" {n.value}") for n in asked], text))


def values(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Make a text in which keys with several numbers each are hidden."""
    made = hay.make_needles(count, rng.getrandbits(32))
    keyed = [[(n.key, str(rng.randint(1_000_000, 9_999_999))) for _ in range(VALUES)] for n in made]
    hidden = [hay.Needle(key, number, "number") for key, number in _mixed(rng, keyed)]
    ids, facts = hidden_in(rng, tokens, [needle.sentence for needle in hidden], text)
    return Document(ids, questions_of([(n.key, n.question, f" {n.value}") for n in hidden], text), facts)


def chains(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Make a text in which chains of variable assignments are hidden. The questions ask for each
    assignment."""
    names = set[str]()
    while len(names) < count * (VALUES + 1):
        names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
    order, facts, asked = rng.sample(sorted(names), len(names)), [], []
    for first, value in enumerate(rng.sample(range(10_000, 100_000), count)):
        chain = order[first * (VALUES + 1) : (first + 1) * (VALUES + 1)]
        links = list(pairwise(chain))
        facts.append([f"VAR {chain[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in links)])
        asked += [(new, f"\nVAR {new} = VAR", f" {old}") for old, new in links]
    ids, places = hidden_in(rng, tokens, _mixed(rng, facts), text)
    return Document(ids, questions_of(asked, text), places)


def with_answers(probe: Document) -> tuple[list[int], list[int]]:
    """Return the token ids of document, questions and answers, and the positions whose logits predict the
    answers' tokens."""
    pieces = [probe.ids, *([*question.prompt, *question.gold] for question in probe.questions)]
    ends = list(accumulate(map(len, pieces)))[1:]
    golds = [len(question.gold) for question in probe.questions]
    answers = [
        place for end, gold in zip(ends, golds, strict=True) for place in range(end - gold - 1, end - 1)
    ]
    return [token for piece in pieces for token in piece], answers


def hidden_in(
    rng: random.Random, tokens: int, facts: Sequence[str], text: Text
) -> tuple[list[int], list[range]]:
    """Insert facts into a text, evenly spaced with random jitter. Returns `tokens` token ids and the facts'
    positions."""
    encoded = text.encode_all([f" {fact}" for fact in facts])
    room = tokens - sum(map(len, encoded))
    if room < 0:
        raise ValueError(f"{len(facts)} facts take {tokens - room} tokens of a document of {tokens}")
    sentences = text.take(rng, room)
    spacing = len(sentences) / max(1, len(facts))
    ids, places, last = list[int](), list[range](), 0
    for i, fact in enumerate(encoded):
        place = max(last, int((i + rng.random()) * spacing))
        ids += joined(sentences[last:place])
        places.append(range(len(ids), len(ids) + len(fact)))
        ids += fact
        last = place
    return ids + joined(sentences[last:]), places


def _mixed(rng: random.Random, lists: Sequence[Sequence[Item]]) -> list[Item]:
    turns = [which for which, items in enumerate(lists) for _ in items]
    rng.shuffle(turns)
    left = [iter(items) for items in lists]
    return [next(left[which]) for which in turns]


def questions_of(asked: Iterable[tuple[str, str, str]], text: Text) -> list[Question]:
    """Make questions from (about, prompt, answer). Raises ValueError if a token spans prompt and answer."""
    known = list(asked)
    prompts = text.encode_all([prompt for _, prompt, _ in known])
    pairs = text.encode_all([prompt + answer for _, prompt, answer in known])
    questions = []
    for (about, _, answer), prompt, pair in zip(known, prompts, pairs, strict=True):
        if pair[: len(prompt)] != prompt:
            raise ValueError(f"the tokenizer joins the question about {about} and its answer {answer!r}")
        questions.append(Question(about, tuple(prompt), tuple(pair[len(prompt) :])))
    return questions


def joined(pieces: Iterable[Sequence[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]
