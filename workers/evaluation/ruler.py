"""RULER's tasks (Hsieh et al. 2024, section 3 and appendix B) in its own wording, made from any text. Pure.

Templates are those of RULER's generator, as lm-evaluation-harness publishes it, its misspelling included. The
two tasks of question answering need other data and are left out.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from deltafront.workers.calibration.needles import make_needles
from deltafront.workers.evaluation.prompts import TaskPrompt

Count = Callable[[str], int]
"""Counts a text's tokens."""
Units = Callable[[random.Random, int], tuple[str, str, tuple[str, ...]]]
"""units(rng, size) returns (document, question, right answers). `size` counts the task's own units, such as
sentences, noise lines or words."""
Task = Callable[["Haystack"], Units]

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
HIDDEN = (
    "Some special magic {kinds} are hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {kinds} afterwards.\n"
)
HIDDEN_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {kind} afterwards.\n"
)
ASKED = (
    "\nWhat are all the special magic {kinds} for {query} mentioned in the provided text?"
    " The special magic {kinds} for {query} mentioned in the provided text are"
)
ASKED_ONE = (
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
    " The special magic {kind} for {query} mentioned in the provided text is"
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TRACE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TRACED = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above,"
    " {count} variables are assgined the value {value}, they are:"
)
LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones"
    " that appear most often.\n"
)
LISTED = (
    "\nQuestion: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are:"
)
CODE = (
    "Read the following coded text and track the frequency of each coded word."
    " Find the three most frequently appeared coded words. "
)
CODED = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most"
    " frequently appeared words in the above coded text?"
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
SEVERAL, HOPS, COMMON, COMMON_TIMES, OTHER_TIMES = 4, 4, 10, 30, 3
SMALLEST = 4
"""Size of the smallest prompt that is tried, in units of its task (`Units`)."""
DEPTHS = 40
"""Number of evenly spaced places in a text where a fact may be inserted."""


class Haystack:
    """A text in which facts are hidden. If a prompt needs a longer text, this one repeats."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, " ".join(text.split())

    @cached_property
    def sentences(self) -> list[str]:
        return re.split(r"(?<=[.!?]) ", self.text)

    def take(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` consecutive sentences, starting from a random one."""
        first = rng.randrange(len(self.sentences))
        return [self.sentences[(first + n) % len(self.sentences)] for n in range(count)]


def make_prompt(task: str, seed: str, tokens: int, haystack: Haystack, count: Count) -> TaskPrompt:
    """Make a prompt of at most `tokens` tokens, and of at least 95% of that if the task allows.

    Args:
        seed: Determines keys, values and where facts are inserted.

    Raises:
        ValueError: The task's smallest prompt is longer.
    """
    units = {**TASKS, **OTHERS}[task](haystack)

    def made(size: int) -> TaskPrompt:
        document, question, answers = units(random.Random(f"{seed} {task} {tokens}"), size)
        return TaskPrompt(task, f"{haystack.name} {task} {seed}", document, question, answers)

    return _fitting(made, tokens, lambda prompt: count(prompt.text), f"task {task}")


def _fitting(
    made: Callable[[int], TaskPrompt], tokens: int, length: Callable[[TaskPrompt], int], what: str
) -> TaskPrompt:
    """Return the largest prompt found with at most `tokens` tokens: extrapolate a size from the length so
    far, and bisect where that is too large."""
    size, best, at = SMALLEST, made(SMALLEST), length(made(SMALLEST))
    if at > tokens:
        raise ValueError(f"{what}: its shortest prompt has {at} tokens, more than {tokens}")
    too_large = 0
    for _ in range(12):
        guess = int(size * (1 + (0.99 * tokens - at) / at))
        guess = min(guess, (size + too_large) // 2) if too_large and guess >= too_large else guess
        if guess <= size:
            break
        tried = made(guess)
        if (got := length(tried)) <= tokens:
            size, best, at = guess, tried, got
        else:
            too_large = guess
    return best


def _one(kind: str, query: str) -> tuple[str, str]:
    return HIDDEN_ONE.format(kind=kind), ASKED_ONE.format(kind=kind, query=query)


def _several(kind: str, queries: Sequence[str]) -> tuple[str, str]:
    query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
    return HIDDEN.format(kinds=f"{kind}s"), ASKED.format(kinds=f"{kind}s", query=query)


def needles(
    kind: str = "number",
    *,
    hay: str = "text",
    keys: int = 1,
    values: int = 1,
    asked: int = 1,
    uuids: bool = False,
) -> Task:
    """Make a needle-in-a-haystack task (NIAH): find the values of keys that are hidden in a haystack.

    Args:
        kind: The kind of the values: `number` or `uuid`.
        hay: The haystack: `text`, `noise` (a repeated line), or other `needles`.
        keys, values: Number of keys, and number of values of each key.
        asked: Number of keys that the question names.
        uuids: True if keys are uuids instead of words.
    """

    def task(haystack: Haystack) -> Units:
        def units(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
            named = _keys(rng, keys + (size if hay == "needles" else 0), uuids)
            facts = [[_value(rng, kind) for _ in range(values)] for _ in named]
            lines = [
                [NEEDLE.format(kind=kind, key=key, value=value) for value in some]
                for key, some in zip(named, facts, strict=True)
            ]
            hidden = [line for some in lines[:keys] for line in some]
            rng.shuffle(hidden)
            if hay == "text":
                context = " ".join(_at_depths(rng, haystack.take(rng, size), hidden))
            else:
                others = (
                    [line for some in lines[keys:] for line in some] if hay == "needles" else [NOISE] * size
                )
                context = "\n".join(_anywhere(rng, others, hidden))
            chosen = rng.sample(range(keys), asked)
            queries = [named[at] for at in chosen]
            single = asked * values == 1
            before, question = _one(kind, queries[0]) if single else _several(kind, queries)
            return before + context, question, tuple(value for at in chosen for value in facts[at])

        return units

    return task


def _keys(rng: random.Random, count: int, uuids: bool) -> list[str]:
    if uuids:
        return [_value(rng, "uuid") for _ in range(count)]
    found = [needle.key for needle in make_needles(min(count, 10_000), rng.getrandbits(32))]
    rng.shuffle(found)
    return found + [f"{rng.choice(found)}-{n}" for n in range(count - len(found))]


def _value(rng: random.Random, kind: str) -> str:
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(1_000_000, 9_999_999))


def _at_depths(rng: random.Random, sentences: Sequence[str], facts: Sequence[str]) -> list[str]:
    """Insert each fact between sentences at a random one of DEPTHS evenly spaced depths."""
    depths = [round(100 * n / (DEPTHS - 1)) for n in range(DEPTHS)]
    places = sorted(len(sentences) * depth // 100 for depth in rng.sample(depths, len(facts)))
    return _inserted(sentences, places, facts)


def _anywhere(rng: random.Random, lines: Sequence[str], facts: Sequence[str]) -> list[str]:
    return _inserted(lines, sorted(rng.choices(range(len(lines) + 1), k=len(facts))), facts)


def _inserted(pieces: Sequence[str], places: Sequence[int], facts: Sequence[str]) -> list[str]:
    made, last = list[str](), 0
    for place, fact in zip(places, facts, strict=True):
        made += [*pieces[last:place], fact]
        last = place
    return [*made, *pieces[last:]]


def variables(haystack: Haystack) -> Units:
    """Make a task that asks for all variables of a chain of assignments, which is hidden in noise. A short
    example with its answer comes first."""
    del haystack

    def units(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
        example, asked, names = _chain(rng, 10, 3)
        document, question, chain = _chain(rng, size, 5)
        shown = f"{TRACE}{example}{asked} {' '.join(names)}\n\n"
        return shown + TRACE + document, question, tuple(chain)

    return units


def _chain(rng: random.Random, noises: int, letters: int) -> tuple[str, str, list[str]]:
    names = list(dict.fromkeys("".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(40)))
    chain, value = names[: HOPS + 1], rng.randint(10_000, 99_999)
    facts = [f"VAR {chain[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(chain))]
    lines = _anywhere(rng, [f"{NOISE}\n"] * noises, facts)
    document = " ".join(lines).replace(". \n", ".\n")
    return document, TRACED.format(value=value, count=len(chain)), chain


def common_words(haystack: Haystack) -> Units:
    """Make a task that asks for the ten words that occur 30 times in a list. Other words occur three
    times."""
    del haystack

    def units(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
        words = _keys(rng, COMMON + size, uuids=False)
        listed = words[:COMMON] * COMMON_TIMES + words[COMMON:] * OTHER_TIMES
        rng.shuffle(listed)
        context = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
        return LIST + context, LISTED, tuple(words[:COMMON])

    return units


def frequent_words(haystack: Haystack) -> Units:
    """Make a task that asks for the three most frequent made-up words. The r-th most frequent occurs r^-2
    times as often as the first, which is `...` and does not count."""
    del haystack

    def units(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
        words = [
            "...",
            *dict.fromkeys("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(2000)),
        ]
        times = [int(50 * size / rank**2) for rank in range(1, len(words) + 1)]
        coded = [word for word, many in zip(words, times, strict=True) for _ in range(many)]
        rng.shuffle(coded)
        return CODE + " ".join(coded), CODED, tuple(words[1:4])

    return units


TASKS: Mapping[str, Task] = {
    "single_1": needles(hay="noise"),
    "single_2": needles(),
    "single_3": needles("uuid"),
    "multikey_1": needles(keys=SEVERAL),
    "multikey_2": needles(hay="needles"),
    "multikey_3": needles("uuid", hay="needles", uuids=True),
    "multivalue": needles(values=SEVERAL),
    "multiquery": needles(keys=SEVERAL, asked=SEVERAL),
    "variables": variables,
    "common_words": common_words,
    "frequent_words": frequent_words,
}


def continuation(haystack: Haystack) -> Units:
    """Make a task that lets the model continue a text. It has no right answer: the score is the agreement
    with dense attention's answer."""

    def units(rng: random.Random, size: int) -> tuple[str, str, tuple[str, ...]]:
        return " ".join(haystack.take(rng, size)), "", ()

    return units


OTHERS: Mapping[str, Task] = {"continuation": continuation}
"""Tasks that are not RULER's."""
