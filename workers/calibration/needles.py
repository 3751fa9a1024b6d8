"""Needle-in-a-haystack prompts after RULER's NIAH tasks (Hsieh et al. 2024), in the format on which our 128K
adapter was trained."""

import random
import re
import uuid
from dataclasses import dataclass

_ADJECTIVES = """
    amber ancient arctic autumn bashful blazing bitter brave breezy brisk bronze bumpy calm candid careful
    charming chilly civic clever coastal copper cosmic crimson curious daring dapper dreamy dusty eager
    earnest elastic electric elegant faded fancy fearless feisty floral foggy formal frosty gentle giddy
    gilded glacial golden grumpy happy hasty hollow honest humble icy idle ivory jagged jolly jovial keen
    kindly laconic lavish lazy leafy lively lonely loyal lucid lunar lush magic marble mellow merry mighty
    misty modest mossy muddy musical narrow nimble noble noisy northern oblong olive opal orderly pale patient
    peppery placid plucky polite proud quaint quiet rapid royal rustic sandy scarlet
""".split()
_NOUNS = """
    acorn anchor anvil apricot armour badger balloon banjo barley basket beacon bishop blanket blossom bonfire
    bottle bramble bucket buffalo button cabin cactus camel candle canyon carpet castle cavern cello chapel
    cherry chimney cobbler comet compass coral cottage cradle cricket crystal curtain cymbal daisy desert
    dolphin donkey drummer eagle elbow falcon feather fiddle finch forest fountain galaxy garden garlic ginger
    giraffe glacier glove goblet gondola granite guitar hammer harbor harvest hazel helmet heron hickory
    island jasmine jigsaw kayak kettle ladder lantern lemon lizard lobster locket magnet mango maple meadow
    mirror monsoon mustard needle nutmeg orchard otter oyster paddle parrot pebble pelican pigeon piano
""".split()
_KINDS = ("uuid", "number", "word")


@dataclass(frozen=True)
class Needle:
    """A fact to hide in a text. `kind` is `uuid`, `number` or `word`."""

    key: str
    value: str
    kind: str

    @property
    def sentence(self) -> str:
        return f"One of the special magic {self.kind}s for {self.key} is: {self.value}."

    @property
    def question(self) -> str:
        return (
            f"\nWhat is the special magic {self.kind} for {self.key} mentioned in the provided text?"
            f" The special magic {self.kind} for {self.key} mentioned in the provided text is"
        )

    def answered_by(self, answer: str) -> bool:
        return answer.strip().startswith(self.value)


def make_needles(count: int, seed: int) -> list[Needle]:
    """Make needles with distinct keys, alternating between kinds. Raises ValueError if there are too few
    words."""
    rng = random.Random(seed)
    pairs = zip(*_words(count, rng), strict=True)
    return [
        Needle(f"{adjective}-{noun}", _value(_KINDS[i % len(_KINDS)], rng), _KINDS[i % len(_KINDS)])
        for i, (adjective, noun) in enumerate(pairs)
    ]


def _words(count: int, rng: random.Random) -> tuple[list[str], list[str]]:
    every = min(len(_ADJECTIVES), len(_NOUNS))
    if count > every**2:
        raise ValueError(f"at most {every**2} needles, {count} asked for")
    adjectives = rng.sample(_ADJECTIVES, min(count, every))
    nouns = rng.sample(_NOUNS, min(count, every))
    size = len(nouns)
    turned = [nouns[(i + i // size) % size] for i in range(count)]
    return [adjectives[i % size] for i in range(count)], turned


def _value(kind: str, rng: random.Random) -> str:
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind == "number":
        return str(rng.randint(1_000_000, 9_999_999))
    return f"{rng.choice(_NOUNS)}-{rng.choice(_NOUNS)}"


def hide(text: str, needles: list[Needle], seed: int) -> str:
    """Insert each needle after a sentence of the text. They are evenly spaced, with random jitter."""
    rng = random.Random(seed)
    ends = [match.end() for match in re.finditer(r"[.!?]\s", text)] or [len(text)]
    spacing = len(ends) / max(1, len(needles))
    places = sorted(ends[int((i + rng.random()) * spacing)] for i in range(len(needles)))
    parts, last = [], 0
    for place, needle in zip(places, rng.sample(needles, len(needles)), strict=True):
        parts += [text[last:place], needle.sentence, " "]
        last = place
    return "".join([*parts, text[last:]])
