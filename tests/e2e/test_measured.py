"""Measurements add up: the parts of TTFT, and /metrics compared with the clients' counts."""

from __future__ import annotations

import json
import re
import secrets
import time
import urllib.request

import psutil
import pytest
from tokenizers import Tokenizer

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.local.server_process import LocalService

from ..collector import Collector, Sent
from .conftest import Haystack, Sizes, Table
from .wire import PATIENCE_S, Answer, Wire, method, packed, text

FINISHED = "deltafront_requests_total"
CALLER = "00f067aa0ba902b7"
"""The caller's own span, parent of the request's spans."""


def scrape(wire: Wire) -> dict[str, float]:
    """Read /metrics: values by sample name with labels."""
    address = wire.info().metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as reply:
        lines = reply.read().decode().splitlines()
    samples = (re.fullmatch(r"(\S+?(?:\{.*\})?) (\S+)", line) for line in lines if not line.startswith("#"))
    return {m[1]: float(m[2]) for m in samples if m}


def total(samples: dict[str, float], name: str, *labels: str) -> float:
    named = {k: v for k, v in samples.items() if k == name or k.startswith(name + "{")}
    return sum(v for k, v in named.items() if all(label in k for label in labels))


def counted(wire: Wire, finished: float) -> dict[str, float]:
    """Wait until /metrics counts this number of finished requests, and return it. Requests are counted after
    their streams end."""
    until = time.monotonic() + PATIENCE_S
    while total(samples := scrape(wire), FINISHED) < finished:
        assert time.monotonic() < until, "the metrics do not know of every request"
        time.sleep(0.1)
    return samples


def run(wire: Wire, prompt: pb.Prompt, name: str) -> Answer:
    options = {} if name == "dense" else {"min_tokens": 0}
    return wire.generate(
        pb.GenerateRequest(
            prompt=prompt,
            attention=method(name, **options),
            sampling=pb.SamplingOptions(max_tokens=8, ignore_eos=True),
        )
    )


def test_ttft_parts_sum_to_the_ttft_and_metrics_agree(
    wire: Wire, haystack: Haystack, tokenizer: Tokenizer, sizes: Sizes, table: Table
) -> None:
    ids = tokenizer.encode(haystack.text).ids[: sizes.mid]
    before = scrape(wire)
    answers = [run(wire, pb.Prompt(token_ids=packed(ids)), name) for name in ("dense", "dpxa", "xattention")]
    for answer in answers:
        server = answer.finish.timings.ttft_seconds
        assert abs(sum(answer.parts.values()) - server) <= 0.02 * server
        assert server <= answer.client_ttft, answer.parts
        assert all(seconds >= 0 for seconds in answer.parts.values()), answer.parts
        if sizes.timed:
            seen = answer.client_ttft
            assert abs(seen - server) <= 0.02 * seen, (seen, answer.parts)
            assert answer.parts["transport"] <= 0.05 * server + 0.02, answer.parts
        table.add(f"{answer.finish.density.method}: TTFT at {len(ids)} tokens, s", round(server, 3))
        table.add(
            f"{answer.finish.density.method}: scoring over attention",
            round(answer.finish.density.scoring_overhead, 3),
        )
    after = counted(wire, total(before, FINISHED) + len(answers))

    def grown(name: str, *labels: str) -> float:
        return total(after, name, *labels) - total(before, name, *labels)

    seen = sum(a.finish.timings.ttft_seconds for a in answers)
    assert grown("deltafront_time_to_first_token_seconds_count") == len(answers)
    assert abs(grown("deltafront_time_to_first_token_seconds_sum") - seen) < 1e-6
    assert abs(grown("deltafront_ttft_part_seconds_total") - seen) < 1e-6
    assert grown("deltafront_request_prompt_tokens_sum") == len(answers) * len(ids)
    assert grown("deltafront_generation_tokens_total") == sum(len(a.token_ids) for a in answers)
    assert grown("deltafront_requests_total", 'method_rpc="Generate"', 'outcome="finished"') == len(answers)
    gaps = sum(a.finish.usage.completion_tokens - 1 for a in answers)
    assert grown("deltafront_inter_token_latency_seconds_count") == gaps


def tree(collector: Collector, trace: str, stages: int) -> list[Sent]:
    """Wait for all spans of a request with one chunk, and return them. Spans arrive in the order of their
    ends."""
    names = {"prefill", "queue", "chunk", "stage", "decode", "first_step"}
    until = time.monotonic() + PATIENCE_S
    while True:
        spans = collector.spans(trace)
        found = [span.name for span in spans]
        if names <= set(found) and found.count("stage") == stages and any(s.parent == CALLER for s in spans):
            return spans
        assert time.monotonic() < until, f"only these spans have come: {sorted(found)}"
        time.sleep(0.1)


@pytest.mark.parametrize("edge", ["grpc", "http"])
def test_callers_trace_contains_spans_of_every_process(
    wire: Wire, http: str, collector: Collector, edge: str
) -> None:
    """The traceparent passes HAProxy and Serve, as metadata or header. The spans of door, group, stages and
    decode worker are one tree under the caller's span."""
    trace, prompt = secrets.token_hex(16), f"{secrets.token_hex(8)}: call me"
    parent = {"traceparent": f"00-{trace}-{CALLER}-01"}
    if edge == "grpc":
        asked = pb.GenerateRequest(prompt=text(prompt), sampling=pb.SamplingOptions(max_tokens=2))
        *_, last = wire.stub.Generate(asked, metadata=list(parent.items()), timeout=PATIENCE_S)
        assert last.finish.trace_id == trace
    else:
        body = json.dumps({"model": wire.info().model, "prompt": prompt, "max_tokens": 2}).encode()
        headers = {"content-type": "application/json", **parent}
        request = urllib.request.Request(f"{http}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            assert json.load(reply)["deltafront"]["trace_id"] == trace
    stages = wire.info().prefill_stages
    spans = tree(collector, trace, stages)
    by_id = {span.id: span for span in spans}
    (root,) = [span for span in spans if span.parent == CALLER]
    above = {"queue": "prefill", "chunk": "prefill", "stage": "chunk"}
    here = ("handoff_exposed", "decode_wait", "append_prefill", "recompute", "first_step")
    above |= dict.fromkeys(here, "decode")
    for span in spans:
        assert span is root or by_id[span.parent].name == above.get(span.name, root.name), span
    once = [span.name for span in spans if span.name != "stage"]
    assert len(once) == len(set(once)), "a part is shown twice"
    homes: dict[str, set[str]] = {}
    for span in spans:
        homes.setdefault(span.process["service.instance.id"].split(":")[0], set()).add(span.name)
    workers = {"prefill": {"prefill", "queue", "chunk"}, **{f"stage{n}": {"stage"} for n in range(stages)}}
    assert homes.keys() == {"door", "decode", *workers}
    assert {home: homes[home] for home in workers} == workers
    assert {root.name, "tokenize", "admission"} <= homes["door"] and "first_step" in homes["decode"]
    assert len({span.process["process.pid"] for span in spans}) == len(homes), "each in its own process"
    assert not any(span.failed for span in spans)


def test_sparse_methods_compute_fewer_tiles_in_less_time(
    wire: Wire, haystack: Haystack, sizes: Sizes
) -> None:
    """Compares streaming with a small window with dense attention: the time of attention and the density.
    Without `timed`, dense does not run."""
    window = min(256, sizes.document // 8)
    sparse = pb.AttentionMethod(name="streaming", options={"window": window, "min_tokens": 0})
    sampling = pb.SamplingOptions(max_tokens=1, ignore_eos=True)
    times = {}
    for attention in (method("dense"), sparse) * 2 if sizes.timed else (sparse,):
        answer = wire.generate(
            pb.GenerateRequest(prompt=text(haystack.text), attention=attention, sampling=sampling)
        )
        seconds = sum(
            phase.seconds
            for stage in answer.finish.timings.stages
            for phase in stage.phases
            if phase.name == "attention"
        )
        times.setdefault(attention.name, []).append(seconds)
        if attention.name == "streaming":
            assert answer.finish.density.mean < 0.6
    if sizes.timed:
        assert min(times["streaming"]) < min(times["dense"])


def test_memory_of_all_processes_stays_within_bounds(service: LocalService, wire: Wire, table: Table) -> None:
    """Memory that several processes share counts once. Memory for KV becomes resident as other tests use it,
    up to the configured size."""
    assert wire.info().decode_workers == 1
    parent = psutil.Process(service.pid)
    session = {p.pid: p for p in [parent, *parent.children(recursive=True)]}
    resident = sum(p.memory_full_info().pss for p in session.values())
    samples, host = scrape(wire), 'tier="host"'
    pages = total(samples, "deltafront_kv_pages", 'worker="decode')
    room = pages * total(samples, "deltafront_kv_page_bytes")
    pages_on_host = total(samples, "deltafront_kv_tier_room_pages", host)
    room += pages_on_host * total(samples, "deltafront_kv_tier_page_bytes", host)
    assert 2 * 2**30 < room < 4 * 2**30
    table.add("memory of all processes, GiB", round(resident / 2**30, 2))
    assert 0.5 * 2**30 < resident < 4.5 * 2**30 + room


def test_only_processes_that_compute_load_torch(service: LocalService) -> None:
    """torch takes 180 MiB per process, so doors and the replicas that own workers must not load it."""
    with_torch = set()
    for process in psutil.Process(service.pid).children(recursive=True):
        if any("libtorch" in mapped.path for mapped in process.memory_maps()):
            with_torch.add(" ".join(process.cmdline()))
    assert all("StageActor" in name or "DecodeActor" in name for name in with_torch) and with_torch
