"""Calibrates levels for an evaluation, on the first halves of texts. It evaluates on the second halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deltafront.kernels.methods import method_spec
from deltafront.workers.calibration.curves import forced_density
from deltafront.workers.calibration.documents import Documents
from deltafront.workers.calibration.method_levels import GROWTH, Told, method_levels, selector_of
from deltafront.workers.model.calibrated.profile import Profile, ProfiledText
from deltafront.workers.model.decoder.stack import LayerStack

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DENSITIES = 0.055, 0.1, 0.17
"""Densities of the levels at LONGEST tokens. At other lengths they are scaled as levels are (`GROWTH`). The
first two are near those that keep dense attention's answers in docs/experiments/0013."""
LONGEST = 131_072
_ABOVE_FORCED = 0.03
"""A level is at least this much denser than sink and window alone."""
MOST_TEXTS = 2
"""Each text that is calibrated on takes two dense prefills, and one more for each layer."""
_QUESTIONS, _TOKENS_A_QUESTION = 40, 750


def halves(texts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Cut each text in the middle, at white space. Return the first halves and the second ones."""
    cuts = {name: max(text.find(" ", len(text) // 2), 0) for name, text in texts.items()}
    return (
        {name: text[: cuts[name]] for name, text in texts.items()},
        {name: text[cuts[name] :] for name, text in texts.items()},
    )


def densities(tokens: int, forced: float) -> list[float]:
    """Return the densities of the levels for prompts of `tokens` tokens. forced: The density of sink and
    window alone."""
    scaled = (density * (LONGEST / tokens) ** GROWTH for density in DENSITIES)
    levels = {round(min(1.0, max(density, forced + _ABOVE_FORCED)), 3) for density in scaled}
    return sorted(levels - {1.0} or levels)


def with_levels(
    profile: Profile,
    stack: LayerStack,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    tokens: int,
    tell: Told,
) -> Profile:
    """Add levels of `dpxa` for prompts of `tokens` tokens to a profile, calibrated on texts' first halves.

    The profile also lists the whole texts, so that no later run evaluates on them. Raises ValueError if a
    half is too short.
    """
    method = method_spec("dpxa", {})
    questions = max(1, min(_QUESTIONS, tokens // _TOKENS_A_QUESTION))
    documents = Documents(tokenizer, halves(texts)[0], questions)
    read = documents.of_length(tokens)
    rule = selector_of(method).rule
    forced = max(forced_density(len(document.ids), rule) for document in read)
    wanted = densities(tokens, forced)
    made = method_levels(stack, {tokens: read}, method, wanted, tell=tell, profile=profile)
    whole = tuple(ProfiledText.of(text, tokens) for text in texts.values())
    return profile.plus(made, (*documents.profiled(tokens), *whole))
