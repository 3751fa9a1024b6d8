"""Tests the prompts that are made of MTRAG's conversations."""

from __future__ import annotations

from deltafront.benchmarks.lab.mtrag import ASKED, prompts


def test_all_turns_of_a_conversation_share_its_passages() -> None:
    texts = {f"p{number}": f"fact {number} " + "filler " * 40 for number in range(30)}

    def turn(name: str, count: int, *needed: str) -> dict[str, object]:
        said = [{"speaker": "user", "text": f"{name} question {n}"} for n in range(count)]
        return {
            "task_id": f"{name}<::>{count}",
            "input": said,
            "contexts": [{"document_id": n} for n in needed],
        }

    found = {
        "documents": [{"document_id": name, "text": text} for name, text in texts.items()],
        "tasks": [turn("a", 1, "p3"), turn("a", 2, "p17"), turn("b", 1, "p29")],
    }
    first, second, other = prompts(found, lambda text: len(text.split()), 300)
    assert first["document"] == second["document"] != other["document"]
    assert texts["p3"] in first["document"] and texts["p17"] in first["document"]
    assert texts["p29"] in other["document"]
    assert second["question"].endswith(f"user: a question 0\nuser: a question 1\n\n{ASKED}")
    for line in (first, second, other):
        assert 200 < len((line["document"] + line["question"]).split()) <= 300
