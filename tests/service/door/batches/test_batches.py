"""Batches through OpenAI's client: their life, their lines' errors, and who may see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltafront.service.door.batches import asking, catalog, work
from deltafront.workers.messages.requests import RefusalReason, Refused
from deltafront.workers.messages.service_tiers import ServiceTier

from ...inprocess import HANG_S, House, wait_until
from ...test_metrics import value
from ..openai_calls import Open
from .calls import BODIES, CHAT, ENDED, RESPONSES, TEXT, answers, begin, lines_of, until

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("endpoint", [CHAT, TEXT, RESPONSES])
def test_batch_is_answered_as_its_requests_are(api: openai.OpenAI, house: House, endpoint: str) -> None:
    batch = begin(api, lines_of(*[BODIES[endpoint]] * 3, endpoint=endpoint), endpoint)
    assert (batch.status, batch.request_counts.total) == ("validating", 0)
    done = until(api, batch, *ENDED)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 3, 0)
    assert done.in_progress_at and done.finalizing_at and done.completed_at and done.error_file_id is None
    found = answers(api, done.output_file_id)
    alone = api.post(endpoint.removeprefix("/v1"), body=BODIES[endpoint], cast_to=httpx.Response).json()
    for line in found.values():
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["request_id"]
        body = line["response"]["body"]
        assert body.keys() == alone.keys() and body["usage"] == alone["usage"]
    assert {job.service_tier for job in house.group.jobs[:3]} == {ServiceTier.FLEX}
    assert value(house, "batch_lines_total", outcome="completed") == 3
    assert value(house, "caller_requests_total", caller="ann", outcome="finished") >= 4


def test_wrong_bodies_become_lines_of_the_error_file(api: openai.OpenAI, house: House) -> None:
    good = BODIES[CHAT]
    bodies = [good, {**good, "stream": True}, {**good, "model": "other"}, {**good, "max_tokens": -1}, {}]
    done = until(api, begin(api, lines_of(*bodies)), *ENDED)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 4)
    assert list(answers(api, done.output_file_id)) == ["line-0"]
    failed = answers(api, done.error_file_id)
    said = {name: one["response"]["body"]["error"] for name, one in failed.items()}
    assert said["line-1"]["param"] == "stream" and "is not for batches" in said["line-1"]["message"]
    assert said["line-2"]["code"] == "model_not_found"
    assert failed["line-2"]["response"]["status_code"] == 404
    assert said["line-3"]["param"] == "max_tokens"
    assert said["line-4"]["message"].endswith("is missing")
    assert value(house, "batch_lines_total", outcome="failed") == 4


@pytest.mark.parametrize(
    ("content", "code", "line", "param"),
    [
        (b"", "empty_file", None, None),
        (b"\n\n", "empty_file", None, None),
        (lines_of(BODIES[CHAT]) + b"\nno json", "invalid_json_line", 2, None),
        (b"[" * 5000, "invalid_json_line", 1, None),
        (lines_of(BODIES[CHAT]) + b"\n" + lines_of(BODIES[CHAT]), "invalid_request", 2, "custom_id"),
        (lines_of(BODIES[TEXT], endpoint=TEXT), "invalid_request", 1, "url"),
        (b'{"custom_id": "a", "method": "GET"}', "invalid_request", 1, "method"),
        (lines_of([]), "invalid_request", 1, "body"),
        (lines_of({"messages": "x" * (1 << 20)}), "line_too_long", 1, None),
    ],
)
def test_batch_fails_if_its_lines_cannot_be_told_apart(
    api: openai.OpenAI, house: House, content: bytes, code: str, line: int | None, param: str | None
) -> None:
    if not content:
        content = b" "
    done = until(api, begin(api, content), *ENDED)
    (problem,) = done.errors.data
    assert (done.status, problem.code, problem.line, problem.param) == ("failed", code, line, param)
    assert problem.message and done.failed_at and not house.group.jobs


def test_cancelled_batch_keeps_what_was_answered(api: openai.OpenAI, house: House) -> None:
    house.decode.pause_at = 2
    bodies = [{**BODIES[CHAT], "max_tokens": 1 + 8 * number} for number in range(3)]
    batch = begin(api, lines_of(*bodies))
    wait_until(lambda: api.batches.retrieve(batch.id).request_counts.completed == 1, "nothing is stored")
    assert api.batches.cancel(batch.id).status == "cancelling"
    done = until(api, batch, *ENDED)
    assert (done.status, done.request_counts.completed) == ("cancelled", 1)
    assert done.cancelling_at and done.cancelled_at and done.error_file_id is None
    assert list(answers(api, done.output_file_id)) == ["line-0"]
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled: it is cancelled"):
        api.batches.cancel(batch.id)
    wait_until(lambda: not house.decode._requests, "the lines still run")


def test_expired_batch_says_so_of_each_line_left(
    api: openai.OpenAI, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.decode.pause_at = 1
    batch = begin(api, lines_of(*[BODIES[CHAT]] * 6))
    until(api, batch, "in_progress")
    monkeypatch.setattr(work, "now", lambda: batch.expires_at)
    done = until(api, batch, *ENDED)
    assert (done.status, done.request_counts.failed, done.output_file_id) == ("expired", 6, None)
    left = answers(api, done.error_file_id).values()
    assert len(left) == 6
    assert {(one["response"], one["error"]["code"]) for one in left} == {(None, "batch_expired")}


def test_lines_wait_while_the_service_is_full(api: openai.OpenAI, house: House) -> None:
    house.group.busy = [Refused(reason=RefusalReason.BUSY, message="full", retry_after_s=0.01)] * 2
    done = until(api, begin(api, lines_of(*[BODIES[CHAT]] * 3)), *ENDED)
    assert (done.status, done.request_counts.completed) == ("completed", 3)


def test_answers_stop_when_the_caller_has_no_room(
    house: House, open_door: Callable[..., str], connect: Open
) -> None:
    api = connect(open_door(max_bytes=4000, width=1))
    done = until(api, begin(api, lines_of(*[BODIES[CHAT]] * 9)), *ENDED)
    counts = done.request_counts
    assert done.status == "completed" and counts.failed and counts.completed + counts.failed == 9
    left = answers(api, done.error_file_id).values()
    assert {one["error"]["code"] for one in left} == {"storage_full"}


def test_callers_do_not_see_each_others_batches(
    api: openai.OpenAI, address: str, connect: Open, house: House
) -> None:
    batch, other = begin(api, lines_of(BODIES[CHAT])), connect(address, "beta")
    done = until(api, batch, *ENDED)
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch") as caught:
            call(batch.id)
        assert caught.value.code == "batch_not_found"
    for file_id in (done.input_file_id, done.output_file_id):
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                call(file_id)
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        other.batches.create(input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h")
    assert not list(other.batches.list()) and not list(other.files.list())
    with pytest.raises(openai.AuthenticationError):
        connect(address, "gamma").batches.list()


def test_batches_are_listed_in_pages_the_newest_first(api: openai.OpenAI) -> None:
    made = [begin(api, lines_of(BODIES[CHAT])).id for _ in range(3)]
    for batch in made:
        until(api, api.batches.retrieve(batch), *ENDED)
    first = api.batches.list(limit=2)
    assert first.has_more and [one.id for one in first.data] == made[:0:-1]
    assert [one.id for one in api.batches.list(limit=2)] == made[::-1], "all pages"
    assert {one.purpose for one in api.files.list()} == {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint: must be one of /v1/chat/completions"),
        ({"completion_window": "1h"}, "completion_window: must be 24h"),
        ({"metadata": {"a": 1}}, "metadata.a: must be a valid string"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a: "),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "is not supported"),
        ({"input_file_id": "file-../../x"}, "there is no file"),
    ],
)
def test_wrong_fields_of_a_batch_are_refused(api: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    file = api.files.create(file=("in.jsonl", lines_of(BODIES[CHAT])), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        api.post("/batches", body=given, cast_to=httpx.Response)
    assert caught.value.status_code in (400, 404)


def test_input_of_a_running_batch_cannot_be_deleted(api: openai.OpenAI, house: House) -> None:
    house.decode.pause_at = 1
    batch = begin(api, lines_of(BODIES[CHAT]))
    with pytest.raises(openai.BadRequestError, match="cancel this batch first"):
        api.files.delete(batch.input_file_id)
    api.batches.cancel(batch.id)
    until(api, batch, *ENDED)
    assert api.files.delete(batch.input_file_id).deleted


def test_caller_has_a_bounded_number_of_batches(
    api: openai.OpenAI, house: House, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "BATCHES", 2)
    monkeypatch.setattr(catalog, "_UNFINISHED", 1)
    made = []
    for _ in range(3):
        made.append(until(api, begin(api, lines_of(BODIES[CHAT])), *ENDED).id)
        wait_until(lambda: not list((place / "queue").iterdir()), "it stays in the queue")
    assert [one.id for one in api.batches.list()] == made[:0:-1], "the oldest has gone"
    house.decode.pause_at = 1
    begin(api, lines_of(BODIES[CHAT]))
    with pytest.raises(openai.BadRequestError, match="at most 1 batches that have not ended"):
        begin(api, lines_of(BODIES[CHAT]))


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1", "/v1/batches", "/v1/batches/b/cancel"])
def test_paths_name_the_key_that_turns_batches_on(
    house: House, make_http: Callable[..., str], path: str
) -> None:
    answer = httpx.get(make_http(house) + path, timeout=HANG_S)
    assert answer.status_code == 404 and "set door.batches to a folder" in answer.json()["error"]["message"]


def test_callers_limit_does_not_hold_up_other_callers(
    house: House, address: str, connect: Open, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("any requests_per_minute=4\nbeta\n")
    slow, quick = connect(address), connect(address, "beta")
    first = begin(slow, lines_of(*[BODIES[CHAT]] * 9))
    wait_until(lambda: slow.batches.retrieve(first.id).request_counts.completed == 1, "nothing is answered")
    done = until(quick, begin(quick, lines_of(*[BODIES[CHAT]] * 9)), *ENDED)
    assert done.request_counts.completed == 9
    assert slow.batches.retrieve(first.id).request_counts.completed == 1


def test_batch_waits_while_its_token_is_not_known(
    house: House, address: str, connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_NO_TOKEN_PAUSE_S", 0.02)
    api = connect(address)
    house.decode.pause_at = 0
    batch = begin(api, lines_of(*[BODIES[CHAT]] * 9))
    wait_until(house.decode.paused.is_set, "no line is asked")
    (tmp_path / "tokens").write_text("beta\n")
    requests, refused = house.door._requests, list[str]()

    def caller_of(owner: str) -> Any:
        refused.append(owner)
        return requests._authenticator.caller_of(owner)

    monkeypatch.setattr(requests, "caller_of", caller_of)
    with pytest.raises(openai.AuthenticationError):
        api.batches.retrieve(batch.id)
    house.decode.pause_at = -1
    wait_until(lambda: len(refused) > 20, "the batch does not wait")
    (tmp_path / "tokens").write_text("beta\nany\n")
    assert until(api, batch, *ENDED).request_counts.completed == 9


def test_line_that_kills_workers_is_given_up(
    api: openai.OpenAI, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_TRIES", 2)
    house.decode.fail_after = [0] * 99
    done = until(api, begin(api, lines_of(BODIES[CHAT])), *ENDED)
    (line,) = answers(api, done.error_file_id).values()
    assert (
        line["response"]["status_code"] == 503 and line["response"]["body"]["error"]["code"] == "unavailable"
    )
    assert len(house.group.jobs) == 6, "two tries of three attempts each"
