"""RULER's tasks (Hsieh et al. 2024), except its two question answering tasks, which need other data.

Facts, texts and counts follow the paper (section 3, appendix B). Each question has three wordings, and the
document's seed chooses one. RULER counts the right answers in one output. We ask for one answer at a time,
each after the earlier ones, and accept any remaining answer. The questions of one turn have the same `about`,
and `questions.by_subject` takes the best of them. RULER's example before common words and chains is left out.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from deltafront.workers.calibration import needles as hay
from deltafront.workers.calibration.probes import Document, Text, hidden_in, joined, questions_of

Asked = list[tuple[str, str, str]]
"""Subject, prompt and right answer of each question."""
Task = Callable[[random.Random, int, int, Text], Document]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEYS, VALUES, HOPS = 4, 4, 4
COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
FREQUENT, ALPHA = 3, 2.0

ONE = (
    "\nWhat is the special magic {kind} for {keys} mentioned in the provided text?"
    " The special magic {kind} for {keys} mentioned in the provided text is",
    "\nQuestion: which special magic {kind} does the text give for {keys}?\nAnswer:",
    "\nAccording to the text above, {keys} has the special magic {kind}",
)
SEVERAL = (
    "\nWhat are all the special magic {kind}s for {keys} mentioned in the provided text? The special magic"
    " {kind}s for {keys} mentioned in the provided text are",
    "\nQuestion: which special magic {kind}s does the text give for {keys}?\nAnswer:",
    "\nAccording to the text above, the special magic {kind}s of {keys} are",
)
HIDDEN = "Some special magic {kind}s are hidden within the following text. Memorize them.\n"
TRACED = (
    "\nFind all variables that are assigned the value {value} in the text above."
    " Answer: {count} variables are assigned the value {value}, they are:",
    "\nQuestion: which variables hold {value}?\nAnswer:",
    "\nIn the text above, {value} is the value of",
)
TRACE = "Memorize and track the chain of variable assignments hidden in the following text.\n"
LISTED = (
    "\nWhat are the {count} most common words in the above list?"
    " Answer: The top {count} words that appear most often in the list are:",
    "\nQuestion: which {count} words does the list have most often?\nAnswer:",
    "\nThe {count} words that the list above repeats most are",
)
LIST = (
    "Below is a numbered list of words. Some of them appear more often than others. Memorize the ones that"
    " appear most often."
)
CODED = (
    "\nWhat are the {count} most frequently appeared words in the above coded text? Answer: According to the"
    " coded text above, the {count} most frequently appeared words are:",
    "\nQuestion: which {count} coded words does the text have most often?\nAnswer:",
    "\nThe {count} coded words that the text above repeats most are",
)
CODE = "Read the following coded text and track the frequency of each coded word. Ignore the dots '....'.\n"


def in_turn(about: str, prompt: str, answers: Sequence[str]) -> Asked:
    """Ask for one answer at a time, after the earlier answers. Each turn has a question for every answer that
    remains."""
    return [
        (f"{about} {turn + 1}", prompt + "".join(f" {said}," for said in answers[:turn]), f" {answer}")
        for turn in range(len(answers))
        for answer in answers[turn:]
    ]


def single(kind: str, *, noise: bool = False, others: int = 0) -> Task:
    """Make a task that asks for the value of one key. Noise or text hides this key and `others` more keys."""

    def task(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
        made = _needles(rng, 1 + others, kind)
        asked = [_one(rng, needle) for needle in made[: max(1, count)]]
        return _hidden(rng, tokens, HIDDEN.format(kind=kind), made, asked, text, noise)

    return task


def alone(kind: str) -> Task:
    """Make a task of needles only, one per line. If the values are uuids, so are the keys."""

    def task(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
        most = tokens // 10 if kind == "uuid" else min(10_000, tokens // 10)
        made = _needles(rng, most, kind, uuid_keys=kind == "uuid")
        lines = text.encode_all([HIDDEN.format(kind=kind), *(f"{needle.sentence}\n" for needle in made)])
        kept = _first(lines, tokens)
        fitting = made[: kept - 1]
        chosen = rng.sample(fitting, min(max(1, count), len(fitting)))
        return Document(joined(lines[:kept]), questions_of([_one(rng, needle) for needle in chosen], text))

    return task


def multivalue(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Ask for all values of one key."""
    del count
    (first,) = _needles(rng, 1, "number")
    values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), VALUES)]
    made = [hay.Needle(first.key, value, "number") for value in values]
    prompt = rng.choice(SEVERAL).format(kind="number", keys=first.key)
    return _hidden(rng, tokens, HIDDEN.format(kind="number"), made, in_turn(first.key, prompt, values), text)


def multiquery(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Ask one question for the values of several keys, in any order."""
    del count
    made = _needles(rng, KEYS, "number")
    named = [needle.key for needle in made]
    prompt = rng.choice(SEVERAL).format(kind="number", keys=f"{', '.join(named[:-1])}, and {named[-1]}")
    asked = in_turn("keys", prompt, [needle.value for needle in made])
    shuffled = rng.sample(made, KEYS)
    return _hidden(rng, tokens, HIDDEN.format(kind="number"), shuffled, asked, text)


def variables(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Ask for all variables of a chain of assignments in noise."""
    del count
    names = set[str]()
    while len(names) <= HOPS:
        names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
    chain, value = rng.sample(sorted(names), HOPS + 1), rng.randint(10_000, 99_999)
    facts = [f"VAR {chain[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in pairwise(chain))]
    prompt = rng.choice(TRACED).format(value=value, count=len(chain))
    ids = _around(rng, tokens, TRACE, facts, text, noise=True)
    return Document(ids, questions_of(in_turn(str(value), prompt, chain), text))


def common_words(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Ask for the ten words that a numbered list contains 30 times; other words occur three times. Raises
    ValueError if `tokens` is too small for the ten words."""
    del count
    words = [needle.key for needle in _needles(rng, min(10_000, COMMON + tokens // OTHER_TIMES), "number")]
    preface, *spelled = text.encode_all([LIST, *(f" {word}" for word in words)])
    kept = COMMON * COMMON_TIMES
    numbers = text.encode_all([f"\n{place}." for place in range(1, kept + OTHER_TIMES * len(words) + 1)])
    room = tokens - len(preface) - len(joined(numbers[:kept])) - COMMON_TIMES * len(joined(spelled[:COMMON]))
    order, others = list(range(COMMON)) * COMMON_TIMES, 0
    for at in range(COMMON, len(words)):
        room -= OTHER_TIMES * len(spelled[at]) + len(joined(numbers[len(order) : len(order) + OTHER_TIMES]))
        if room < 0:
            break
        order += [at] * OTHER_TIMES
        others += 1
    if not others:
        raise ValueError(f"{COMMON} common words and another take more than {tokens} tokens")
    rng.shuffle(order)
    listed = joined([*number, *spelled[at]] for number, at in zip(numbers, order, strict=False))
    prompt = rng.choice(LISTED).format(count=COMMON)
    asked = in_turn("common words", prompt, words[:COMMON])
    return Document([*preface, *listed], questions_of(asked, text))


def frequent_words(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Ask for the most frequent coded words. Word r occurs 1 / r² times as often as word 1, which is "....".
    Raises ValueError if `tokens` is too small to rank them."""
    del count
    made = set[str]()
    while len(made) < max(10, tokens // 50):
        made.add("".join(rng.choices(string.ascii_lowercase, k=6)))
    words = ["....", *rng.sample(sorted(made), len(made))]
    preface, *coded = text.encode_all([CODE, *(f" {word}" for word in words)])
    room, first = tokens - len(preface), float(tokens)
    while True:
        times = [max(1, int(first * rank**-ALPHA)) for rank in range(1, len(words) + 1)]
        total = sum(many * len(piece) for many, piece in zip(times, coded, strict=True))
        if total <= room or first < 1:
            break
        first *= min(0.995, room / total)
    if total > room or any(a <= b for a, b in pairwise(times[: FREQUENT + 2])):
        raise ValueError(f"{FREQUENT} frequent words do not stand out in {tokens} tokens")
    order = [at for at, many in enumerate(times) for _ in range(many)]
    rng.shuffle(order)
    prompt = rng.choice(CODED).format(count=FREQUENT)
    asked = in_turn("frequent words", prompt, words[1 : FREQUENT + 1])
    return Document([*preface, *joined(coded[at] for at in order)], questions_of(asked, text))


def _needles(rng: random.Random, count: int, kind: str, *, uuid_keys: bool = False) -> list[hay.Needle]:
    """Make needles with distinct keys and values."""

    def some_uuid() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    if uuid_keys:
        keys = [some_uuid() for _ in range(count)]
    else:
        keys = [needle.key for needle in hay.make_needles(count, rng.getrandbits(32))]
        rng.shuffle(keys)
    if kind == "uuid":
        values = [some_uuid() for _ in keys]
    else:
        values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), count)]
    return [hay.Needle(key, value, kind) for key, value in zip(keys, values, strict=True)]


def _one(rng: random.Random, needle: hay.Needle) -> tuple[str, str, str]:
    prompt = rng.choice(ONE).format(kind=needle.kind, keys=needle.key)
    return needle.key, prompt, f" {needle.value}"


def _hidden(
    rng: random.Random,
    tokens: int,
    preface: str,
    made: Sequence[hay.Needle],
    asked: Asked,
    text: Text,
    noise: bool = False,
) -> Document:
    facts = [needle.sentence for needle in made]
    return Document(_around(rng, tokens, preface, facts, text, noise=noise), questions_of(asked, text))


def _around(
    rng: random.Random, tokens: int, preface: str, facts: Sequence[str], text: Text, *, noise: bool
) -> list[int]:
    """Return `tokens` tokens: the preface, then text or noise that hides the facts in order."""
    (before,) = text.encode_all([preface])
    around = text
    if noise:
        around = Text(NOISE, text.encode_all)
        around.sentences *= tokens // len(joined(around.sentences)) + 2
    return before + hidden_in(rng, tokens - len(before), facts, around)[0]


def _first(pieces: Sequence[Sequence[int]], tokens: int) -> int:
    """Return the number of leading pieces that fit into `tokens` tokens."""
    taken = 0
    for at, piece in enumerate(pieces):
        taken += len(piece)
        if taken > tokens:
            return at
    return len(pieces)


TASKS: Mapping[str, Task] = {
    "ruler_single_1": single("number", noise=True),
    "ruler_single_2": single("number"),
    "ruler_single_3": single("uuid"),
    "ruler_multikey_1": single("number", others=KEYS - 1),
    "ruler_multikey_2": alone("number"),
    "ruler_multikey_3": alone("uuid"),
    "ruler_multivalue": multivalue,
    "ruler_multiquery": multiquery,
    "ruler_variables": variables,
    "ruler_common_words": common_words,
    "ruler_frequent_words": frequent_words,
}
