"""Unit tests of small modules: clock, plan, errors, session ids, bearer tokens, metrics and their port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.door import status
from deltafront.service.door.auth import ANYONE, Authenticator, TokenFile, digest
from deltafront.service.errors import (
    Code,
    ConnectionLost,
    DeltafrontError,
    InvalidArgument,
    NotFound,
    Overloaded,
    RemoteError,
    Unauthenticated,
)
from deltafront.service.exporter import Exporter
from deltafront.service.fleet.session_ids import worker_of
from deltafront.service.fleet.worker_gauges import WorkerState
from deltafront.service.metrics import Metrics
from deltafront.service.request.callers import Caller, Quota
from deltafront.service.request.calls import pack_ids
from deltafront.service.request.run.plan import plan_answer
from deltafront.service.request.ttft_clock import REPLAY, TtftClock
from deltafront.service.tracing import Interval
from deltafront.workers.messages.states import TierStats

from .inprocess import HANG_S, wait_until

seconds = st.floats(0, 1e3)


# --- time to first token -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(seconds, st.dictionaries(st.sampled_from("abc"), seconds, max_size=3)), max_size=6))
def test_ttft_parts_always_add_up_to_the_elapsed_time(steps: list[tuple[float, dict[str, float]]]) -> None:
    now = [100.0]
    clock = TtftClock(lambda: now[0])
    for passed, reported in steps:
        now[0] += passed
        clock.span(reported) if reported else clock.lap("lap")
    parts = clock.parts()
    assert sum(parts.values()) == pytest.approx(clock.elapsed, abs=1e-6)
    assert all(part >= 0 for part in parts.values())
    assert list(parts)[-1] == "transport"


def test_ttft_time_that_no_worker_reports_counts_as_transport() -> None:
    now = [0.0]
    clock = TtftClock(lambda: now[0])
    now[0] = 1.0
    clock.lap("tokenize")
    now[0] = 4.0
    clock.span({"queue": 1.0, "prefill.attention": 1.5})
    assert clock.parts() == {
        "tokenize": 1.0, "queue": 1.0, "prefill.attention": 1.5, "transport": 0.5,
    }  # fmt: skip
    assert [one.part for one in clock.intervals] == ["tokenize"], "workers show their own parts"


def test_negative_time_of_a_worker_counts_as_nothing() -> None:
    now = [0.0]
    clock = TtftClock(lambda: now[0])
    now[0] = 2.0
    clock.span({"queue": 1.5, "prefill.group_overhead": -1e-16})
    assert clock.parts() == {"queue": 1.5, "prefill.group_overhead": 0.0, "transport": 0.5}


def test_time_lost_with_a_dead_worker_is_a_replay_interval() -> None:
    now = [0.0]
    clock = TtftClock(lambda: now[0])
    now[0] = 4.0
    clock.span({"queue": 1.0, "prefill.attention": 1.5}, REPLAY)
    assert clock.intervals == [Interval(REPLAY, 2.5, 1.5)]


# --- plan --------------------------------------------------------------------------------------------------


def test_token_ids_are_packed_little_endian() -> None:
    assert pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 60), st.integers(0, 10), st.booleans())
def test_prompt_and_max_tokens_never_exceed_the_context(
    prompt: int, append: int, wanted: int, streamed: int, keep: bool
) -> None:
    positions = 50
    head, tail, said = pack_ids(range(prompt)), pack_ids(range(append)), list(range(streamed))
    try:
        plan = plan_answer(
            head, tail, max_tokens=wanted, positions=positions, answered=said, keep=keep, fit_max_tokens=True
        )
    except InvalidArgument as error:
        assert prompt + append >= positions
        assert error.field == "prompt"
        return
    assert plan.prefill_ids == head + tail and plan.answered_ids == pack_ids(said)
    assert plan.keep_tokens == (prompt if keep else 0)
    assert plan.max_tokens + streamed == min(wanted, positions - prompt - append)
    assert plan.prefill_tokens + plan.answer_tokens <= max(positions, prompt + append + streamed)


def test_explicit_max_tokens_fits_or_is_refused() -> None:
    assert plan_answer(pack_ids(range(40)), b"", max_tokens=10, positions=50).max_tokens == 10
    with pytest.raises(InvalidArgument, match=r"40 tokens and max_tokens of 11 .* or ask for less"):
        plan_answer(pack_ids(range(40)), b"", max_tokens=11, positions=50)


def test_plan_appends_a_sessions_answered_tokens_to_its_prompt() -> None:
    plan = plan_answer(b"", pack_ids([7]), max_tokens=9, positions=50, answered=[1, 2], keep=True)
    assert (plan.prefill_ids, plan.answered_ids) == (pack_ids([7, 1, 2]), b"")
    assert (plan.max_tokens, plan.keep_tokens) == (7, 0)


def test_session_may_fill_the_context() -> None:
    assert plan_answer(pack_ids(range(50)), b"", max_tokens=0, positions=50, keep=True).keep_tokens == 50
    with pytest.raises(InvalidArgument, match="51 tokens exceed the model's 50 positions"):
        plan_answer(pack_ids(range(51)), b"", max_tokens=0, positions=50, keep=True)


# --- errors ------------------------------------------------------------------------------------------------

PRINTABLE = "".join(map(chr, range(32, 127))).replace("%", "")
KINDS = [kind for kind in DeltafrontError.__subclasses__() if kind.code is not Code.UNKNOWN]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not InvalidArgument])
@pytest.mark.parametrize("retry_after_s", [None, 0.2, 7.0])
def test_errors_survive_grpc_encoding_and_decoding(
    kind: type[DeltafrontError], retry_after_s: float | None
) -> None:
    sent = kind("two\nlines", retry_after_s=retry_after_s)
    got = status.from_status(status.status(sent), status.details(sent), status.trailers(sent))
    assert type(got) is kind
    assert got.message == "two lines"
    assert got.retry_after_s == {None: None, 0.2: 1.0, 7.0: 7.0}[retry_after_s]


def test_an_invalid_argument_keeps_its_field() -> None:
    sent = InvalidArgument("sampling.top_p", "1.5 must be at most 1")
    got = status.from_status(status.status(sent), status.details(sent))
    assert isinstance(got, InvalidArgument)
    assert (got.field, got.message) == ("sampling.top_p", sent.message)


def test_grpc_trailers_say_whether_to_retry() -> None:
    ours = {status.OWN_STATUS: "resource_exhausted"}
    assert dict(status.trailers(Overloaded("too large"))) == {**ours, status.PUSHBACK: "-1"}
    assert dict(status.trailers(Overloaded("full", retry_after_s=1.5))) == {
        **ours, "retry-after": "2", "grpc-retry-pushback-ms": "1500",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["x", "%", "é", "あ", "😀", "x😀あ\x00"])
def test_error_details_are_cut_to_fit_percent_encoded_headers(text: str) -> None:
    sent = status.details(NotFound(text * 5000))
    assert sent.endswith("…") and text.startswith(sent[:-1][: len(text)])
    assert 2980 < len(quote(sent, safe=PRINTABLE)) <= 3000
    fits = text * (3000 // len(quote(text, safe=PRINTABLE)))
    assert status.details(NotFound(fits)) == fits


def test_every_error_has_its_own_status() -> None:
    assert {kind.code for kind in KINDS} == set(Code) - {Code.UNKNOWN}
    assert len({status.STATUS[kind.code] for kind in KINDS}) == len(KINDS)
    assert {code: found.name.lower() for code, found in status.STATUS.items()} == {c: c.value for c in Code}
    for between in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "NOT_FOUND"):
        lost = status.from_status(grpc.StatusCode[between], "The actor died unexpectedly")
        assert isinstance(lost, ConnectionLost)
        assert "actor" not in lost.message
    other = status.from_status(grpc.StatusCode.UNIMPLEMENTED, "no")
    assert isinstance(other, RemoteError)
    assert (other.code, other.status) == (Code.UNKNOWN, "UNIMPLEMENTED")


# --- sessions and tokens -----------------------------------------------------------------------------------


def test_session_id_names_its_worker() -> None:
    assert worker_of("ab12.r_a-ndom") == worker_of("decode:ab12.r_a-ndom") == "decode:ab12"
    for wrong in ("", "ab12", ".x", "a.", "a b.c", "a.b.c", "../x.y", "x" * 1000 + ".y"):
        with pytest.raises(NotFound):
            worker_of(wrong)


def test_token_file_is_reloaded_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# staff\nalpha\n\n  beta  \n")
    door = Authenticator(TokenFile(path, Quota()))

    def owner(token: str) -> str:
        return door.caller([("authorization", f"Bearer {token}")]).owner

    assert owner("alpha") == digest("alpha") != owner("beta")
    for wrong in ("gamma", "", "# staff", "alpha beta"):
        with pytest.raises(Unauthenticated):
            owner(wrong)
    for metadata in ([], [("authorization", "Basic alpha")], [("authorization", "Bearer alpha")] * 2):
        with pytest.raises(Unauthenticated):
            door.caller(metadata)
    path.write_text("gamma\n")
    assert owner("gamma") == digest("gamma")
    with pytest.raises(Unauthenticated):
        owner("alpha")
    path.unlink()
    with pytest.raises(Unauthenticated):
        owner("gamma")


def test_a_token_file_must_hold_a_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no token"):
        TokenFile(tmp_path / "tokens", Quota())
    assert Authenticator(None).caller([]) == ANYONE


def test_token_line_may_set_a_name_and_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    minute = "requests_per_minute=60 tokens_per_minute=9000"
    path.write_text(f"alpha name=ann requests=3\nbeta tokens=500 requests=0\ngamma\ndelta {minute}\n")
    tokens = TokenFile(path, Quota(requests=2))
    delta = tokens.caller("delta")
    assert delta is not None and delta.quota == Quota(2, None, 60, 9000)
    ann = Caller(digest("alpha"), "ann", Quota(3, None), "ann")
    assert tokens.caller("alpha") == ann
    assert tokens.caller("beta") == Caller(digest("beta"), digest("beta")[:12], Quota(None, 500))
    assert tokens.caller("gamma") == Caller(digest("gamma"), digest("gamma")[:12], Quota(2, None))
    path.write_text("alpha name=ann requests=3\nbeta requests=many\n")
    assert tokens.caller("alpha") == ann
    assert tokens.caller("beta") is None
    assert "line 2: after a token only" in caplog.text
    assert "beta" not in caplog.text
    with pytest.raises(ValueError, match="line 2: after a token only name=…, best="):
        TokenFile(path, Quota())


def test_token_line_that_is_not_utf_8_blocks_no_other_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text("alpha\n")
    tokens = TokenFile(path, Quota())
    path.write_bytes(b"alpha\nbeta name=J\xfcrgen\n")
    assert tokens.caller("alpha") is not None
    assert tokens.caller("beta") is None
    assert "line 2: it is not UTF-8" in caplog.text


# --- metrics -----------------------------------------------------------------------------------------------


def samples(metrics: Metrics) -> dict[str, float]:
    lines = metrics.expose().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


def test_ttft_part_metrics_sum_exactly_to_ttft(tmp_path: Path) -> None:
    metrics, rng, total = Metrics(tmp_path), random.Random(3), 0.0
    for _ in range(50):
        now = [0.0]
        clock = TtftClock(lambda now=now: now[0])  # type: ignore[misc]
        for part in ("tokenize", "admission"):
            now[0] += rng.random()
            clock.lap(part)
        metrics.observe_first_token(tuple(clock.parts().items()), prefill_tokens=rng.choice((10, 1 << 20)))
        total += sum(clock.parts().values())
    seen = samples(metrics)
    sums = [v for k, v in seen.items() if k.startswith("deltafront_time_to_first_token_seconds_sum")]
    assert len(sums) == 2 and sum(sums) == pytest.approx(total, rel=1e-12)
    parts = [v for k, v in seen.items() if k.startswith("deltafront_ttft_part_seconds_total")]
    assert sum(parts) == pytest.approx(total, rel=1e-12)
    slowest = [
        f'deltafront_time_to_first_token_seconds_bucket{{le="640.0",prompt="{p}"}}' for p in ("1K", "more")
    ]
    assert sum(seen[name] for name in slowest) == 50


TIER = TierStats(
    tier="host",
    room=60,
    pages=60,
    bytes_per_page=2048,
    evicted=3,
    evicted_retained=1,
    evicted_age_s=1.5,
    missed=1,
    back=0,
    back_s=0.0,
)


def test_metrics_of_a_dead_door_keep_counters_but_not_gauges(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        dying = Metrics(tmp_path)
        dying.count_replay()
        dying.workers.update({"decode:x": WorkerState(0.75, running=3, waiting=2, sessions=1)})
        os._exit(0)
    os.waitpid(child, 0)
    metrics = Metrics(tmp_path)
    metrics.count_replay()
    seen = samples(metrics)
    assert seen["deltafront_replays_total"] == 2
    assert 'deltafront_kv_cache_usage_ratio{worker="decode:x"}' not in seen
    metrics.workers.update({"decode:x": WorkerState(0.5, running=1, up=1)})
    for worker in ("decode:x", "decode:y"):
        metrics.workers.tiered(worker, (TIER, replace(TIER, tier="disk")))
    metrics.workers.update({"decode:y": WorkerState(0.25, running=1, up=1)})
    seen = samples(metrics)
    assert seen['deltafront_num_requests_running{worker="decode:x"}'] == 0
    assert seen['deltafront_num_requests_running{worker="decode:y"}'] == 1
    assert seen['deltafront_worker_up{worker="decode:x"}'] == 0
    assert seen['deltafront_worker_up{worker="decode:y"}'] == 1
    assert seen['deltafront_kv_cache_usage_ratio{worker="decode:x"}'] == 0
    assert seen['deltafront_kv_cache_usage_ratio{worker="decode:y"}'] == 0.25
    pages = {
        worker: seen[f'deltafront_kv_tier_pages{{tier="disk",worker="decode:{worker}"}}'] for worker in "xy"
    }
    assert pages == {"x": 0, "y": 60}, "a tier that is full for ever would be said to do nothing"


def test_doors_on_one_node_do_not_sum_a_workers_gauges(tmp_path: Path) -> None:
    """Both doors run on one node. The gauges have the worker's value, not the sum over doors."""
    states = {
        "decode:x": WorkerState(0.5, running=3, waiting=2, sessions=4),
        "prefill:y": WorkerState(0.1, running=1),
    }
    metrics = Metrics(tmp_path)
    metrics.workers.update(states)
    told, kept = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        Metrics(tmp_path).workers.update(states)
        os.write(told[1], b".")
        os.read(kept[0], 1)
        os._exit(0)
    os.read(told[0], 1)
    seen = samples(metrics)
    os.write(kept[1], b".")
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob("gauge_livemostrecent_*.db"))) == 2
    for gauge, wanted in (("num_requests_running", 4), ("num_requests_waiting", 2), ("sessions", 4)):
        assert sum(v for k, v in seen.items() if k.startswith(f"deltafront_{gauge}{{")) == wanted


def test_exporter_stopped_during_its_start_closes_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Exporter(Metrics(tmp_path), "127.0.0.1", 0)
    stopping, listen = threading.Thread(target=made.stop), asyncio.start_server

    async def listen_while_it_is_stopped(*arguments: Any, **options: Any) -> Any:
        server = await listen(*arguments, **options)
        stopping.start()
        async with asyncio.timeout(HANG_S):
            await made._stopped.wait()
        return server

    monkeypatch.setattr(asyncio, "start_server", listen_while_it_is_stopped)
    made.start()
    made._thread.join(HANG_S)
    assert not made._thread.is_alive()
    stopping.join(HANG_S)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_another_exporter_takes_over_the_metrics_port(
    host: str, family: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltafront.service.exporter._TAKEOVER_S", 0.05)
    try:
        with socket.create_server((host, 0), family=family) as free:
            port = free.getsockname()[1]
    except OSError as error:
        pytest.skip(f"nothing can listen at {host} here: {error.strerror}")
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    first, second = (Exporter(Metrics(tmp_path / name), host, port) for name in ("a", "b"))
    for metrics, times in ((first._metrics, 1), (second._metrics, 2)):
        for _ in range(times):
            metrics.count_replay()

    def scrape() -> float:
        until = time.monotonic() + HANG_S
        while True:
            try:
                with urllib.request.urlopen(f"{address}/metrics", timeout=HANG_S) as reply:
                    text = reply.read().decode()
                return float(
                    next(x for x in text.splitlines() if x.startswith("deltafront_replays")).split()[1]
                )
            except urllib.error.URLError:
                assert time.monotonic() < until
                time.sleep(0.02)

    first.start()
    assert scrape() >= 1
    second.start()
    held = scrape()
    first.stop()
    assert scrape() >= held
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/secrets", timeout=HANG_S)
    second.stop()


def test_idle_connections_take_no_thread_and_keep_no_scrape_waiting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exporter = Exporter(Metrics(tmp_path), "127.0.0.1", port)
    exporter.start()
    with contextlib.ExitStack() as kept:
        wait_until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), "nobody listens")
        before = threading.active_count()
        for _ in range(300):
            kept.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S))
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S) as reply:
                assert b"deltafront_" in reply.read()
        assert threading.active_count() < before + 10
        assert len(exporter._waiting) <= 100
    exporter.stop()
    assert not exporter._thread.is_alive()
