"""dspy by its own client and by litellm: its language model, and predictions with typed fields."""

from __future__ import annotations

import dspy
from rows import ANSWER, ARGUMENTS, BASE, MODEL, QUESTION, case, main

WHERE = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1", "api_key": "any"}
OWN, LITELLM = (dspy.LM(**WHERE, engine=engine, cache=False, num_retries=0) for engine in ("lm15", "litellm"))


def check(adapter: dspy.Adapter | None) -> None:
    with dspy.context(lm=LITELLM, adapter=adapter):
        found = dspy.Predict("question -> city: str, days: int")(question=QUESTION)
    assert {"city": found.city, "days": found.days} == ARGUMENTS


@case
def language_model() -> None:
    assert OWN(QUESTION) == LITELLM(QUESTION) == [ANSWER]


@case
def predict_by_json() -> None:
    check(dspy.JSONAdapter())


@case
def predict_after_text() -> None:
    """The answer lacks the marks that dspy asks for first, so dspy asks again, for JSON."""
    check(None)


main()
