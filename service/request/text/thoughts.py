"""Grammars of answers that may begin with reasoning, marked `<think>…</think>`."""

import json

OPEN, CLOSE = "<think>", "</think>"
_ANSWER = "answer"


def is_open(prompt: str) -> bool:
    """Say whether an answer to this prompt begins inside reasoning."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


def with_thoughts(grammar: str, prompt: str) -> str:
    """Let an answer reason before it follows a grammar.

    Args:
        prompt: The text that the chat template writes before the answer. If this text closes the reasoning,
            the grammar is returned unchanged.
    """
    if CLOSE in prompt and not is_open(prompt):
        return grammar
    opened = is_open(prompt)
    begin = "" if opened else json.dumps(OPEN)
    rules = [
        "%llguidance {}",
        f"start: thought SPACE @{_ANSWER}" + ("" if opened else f" | @{_ANSWER}"),
        rf"thought[lazy]: {begin} /(.|\n)*/ {json.dumps(CLOSE)}",
        r"SPACE: /[ \n]{0,4}/",
    ]
    answer = [{"lark_grammar": grammar}]
    if grammar.startswith("{"):  # llguidance's JSON, whose first grammar is where it begins
        answer = json.loads(grammar)["grammars"]
    answer[0]["name"] = _ANSWER
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *answer]})
