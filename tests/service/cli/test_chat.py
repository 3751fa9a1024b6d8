"""`deltafront chat` with a door and fake workers: its requests, its sessions and its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient

from ..inprocess import House
from ..test_requests import expected, ids, nothing_left
from .test_main import run

DOCUMENT = "a document " * 30
READ = f"[s:be nice][u:{DOCUMENT}]"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT)
    return path


def says(read: str, count: int = 4) -> str:
    return expected(ids(read, bos=False), count)


def chat(house: House, *arguments: object, questions: str) -> Any:
    return run("chat", *arguments, "--max-tokens", 4, "--address", house.address, stdin=questions)


def test_prefills_a_document_once_for_many_questions(house: House, document: Path) -> None:
    done = chat(house, document, questions="who?\n\nand why?\n")
    assert done.exit_code == 0, done.output
    first = says(f"{READ}[u:who?][a:")
    second = says(f"{READ}[u:who?][a:{first}][u:and why?][a:")
    assert done.stdout == f"{first}\n{second}\n"
    assert len(house.group.jobs) == 1
    assert f"{len(READ)} cached" in done.stderr
    nothing_left(house)


def test_chat_sends_recompute_blocks_with_every_question(house: House, document: Path) -> None:
    done = chat(house, document, "--recompute", 2, questions="who?\nwhy?\n")
    assert done.exit_code == 0, done.output
    assert [told.options.recompute_blocks for told in house.decode.reservations] == [0, 2, 2]


def test_without_a_document_the_conversation_is_the_prompt(house: House) -> None:
    done = chat(house, "--system", "be brief", questions="who?\nwhy?\n")
    first = says("[s:be brief][u:who?][a:")
    assert done.stdout == f"{first}\n{says(f'[s:be brief][u:who?][a:{first}][u:why?][a:')}\n"
    nothing_left(house)


def test_prefills_again_if_the_session_is_gone(
    house: House, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.decode.remembers = False
    generate = DeltafrontClient.generate

    def forgetful(client: DeltafrontClient, *arguments: Any, **options: Any) -> Any:
        """Let the first question find no session, as after a worker's death."""
        monkeypatch.setattr(DeltafrontClient, "generate", generate)
        client.release(options["session_id"])
        return generate(client, *arguments, **options)

    monkeypatch.setattr(DeltafrontClient, "generate", forgetful)
    done = chat(house, document, questions="who?\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == says(f"{READ}[u:who?][a:") + "\n"
    assert "prefilling the document again" in done.stderr
    assert len(house.group.jobs) == 2
    nothing_left(house)


def test_failed_question_leaves_the_conversation_unchanged(house: House, document: Path) -> None:
    long = "x" * 8192
    done = chat(house, document, questions=f"{long}\nwho?\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == says(f"{READ}[u:who?][a:") + "\n"
    assert "positions" in done.stderr
    assert "Traceback" not in done.output


def test_an_answer_can_be_stopped(house: House, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, answers = DeltafrontClient.generate, []

    def interrupted(client: DeltafrontClient, *arguments: Any, **options: Any) -> Any:
        """Raise Ctrl-C at the first answer's second token."""
        answers.append(options)
        for number, event in enumerate(generate(client, *arguments, **options)):
            if len(answers) == 1 and number == 2:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(DeltafrontClient, "generate", interrupted)
    done = chat(house, document, questions="who?\nwhy?\n")
    assert done.exit_code == 0, done.output
    assert "stopped" in done.stderr
    assert done.stdout.endswith(says(f"{READ}[u:why?][a:") + "\n")
    nothing_left(house)


def test_refuses_a_question_that_is_not_utf_8_in_one_line(house: House, document: Path) -> None:
    done = run("chat", document, "--address", house.address, stdin=b"\xff\n")
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exception
    assert done.stderr.endswith("deltafront: standard input cannot be read: it is not UTF-8 text\n")
    nothing_left(house)


def test_reads_questions_only_from_standard_input(house: House) -> None:
    done = chat(house, "-", questions="who?\n")
    assert done.exit_code == 1
    assert "give the document as a file" in done.stderr
