"""The dashboard of the time to first token: its distribution and its parts, also by prompt length."""

from __future__ import annotations

from deltafront.dashboards.grafana import Dashboard, Panel, Query, Row
from deltafront.dashboards.promql import RANGE, in_order, increase, mean, quantile, rate

_TTFT = "time_to_first_token_seconds"
_PARTS = "ttft_part_seconds_total"
_LENGTHS = "Lengths are upper bounds of the tokens that were prefilled, without those that a session held."
_OBJECTIVE = ((30.0, "red"),)
_DOOR = 'part=~"tokenize|worker_wait|admission|transport|replay"'
_DECODE = 'part=~"handoff_exposed|decode_wait|append_prefill|recompute|first_step"'
_ATTENDING = "prefill.(attention|anchors|scoring|selection|correction)"
_KINDS = {
    "queue": 'part="queue"',
    "attention": 'part="prefill.attention"',
    "choosing tiles": 'part=~"prefill.(anchors|scoring|selection|correction)"',
    "projection": 'part="prefill.projection"',
    "other prefill": f'part=~"prefill.+",part!~"{_ATTENDING}|prefill.projection"',
    "decode": _DECODE,
    "door": _DOOR,
}
"""Kinds of the parts of the time to first token, with the label matchers that select each kind's parts."""
_COUNT = rate(f"{_TTFT}_count", "prompt", window=RANGE)


def _parts(where: str) -> str:
    """Make the PromQL of each part's mean seconds per request. The parts add up to the mean time to first
    token."""
    return f"{rate(_PARTS, 'part', where)} / ignoring (part) group_left {rate(_TTFT + '_count')}"


def _lengths(expr: str) -> str:
    return in_order(expr, "prompt")


HOW_LONG = Row(
    "How long",
    (
        Panel(
            "Quantiles and mean",
            "Time from a request's arrival at the door to its first token.",
            "s",
            [Query(quantile(q, _TTFT), f"{q:.0%}") for q in (0.5, 0.9, 0.99)] + [Query(mean(_TTFT), "mean")],
            levels=_OBJECTIVE,
        ),
        Panel(
            "Distribution",
            "First tokens by time. Two bands are two kinds of requests: compare them by length.",
            "s",
            [Query(increase(f"{_TTFT}_bucket", "le"), "{{le}}")],
            kind="heatmap",
        ),
        Panel(
            "Share within",
            "Share of first tokens within 1, 5 and 30 s. The objective is 95% within 30 s.",
            "percentunit",
            [
                Query(f"{rate(_TTFT + '_bucket', where=within)} / {rate(_TTFT + '_count')}", f"{bound} s")
                for bound in (1, 5, 30)
                for within in [f'le="{bound}.0"']
            ],
            levels=((0.0, "red"), (0.95, "green")),
        ),
    ),
)
PARTS = Row(
    "What it consists of",
    (
        Panel(
            "Parts, mean of a request",
            "They add up to the mean time to first token. Look at the largest; docs/operations.md says what "
            "each means and what helps.",
            "s",
            [Query(_parts(""), "{{part}}")],
            stacked=True,
            columns=16,
        ),
        Panel(
            "Parts, whole time range",
            "Mean seconds of a request.",
            "s",
            [
                Query(
                    f"sort_desc({rate(_PARTS, 'part', window=RANGE)} / ignoring (part) group_left "
                    f"{rate(_TTFT + '_count', window=RANGE)})",
                    "{{part}}",
                )
            ],
            kind="bargauge",
        ),
        Panel(
            "Outside the workers",
            "What the door does itself, waits for, and loses on the way. `worker_wait`: no worker was there. "
            "`replay`: attempts that a worker's death undid.",
            "s",
            [Query(_parts(_DOOR), "{{part}}")],
            stacked=True,
        ),
        Panel(
            "Prefill",
            "Along the critical path. `activation_wait`: the last stage waits for the one before; "
            "`other_requests`: chunks of other requests in between.",
            "s",
            [Query(_parts('part=~"queue|prefill.+"'), "{{part}}")],
            stacked=True,
        ),
        Panel(
            "Decode",
            "`handoff_exposed`: KV cache that came after prefill's end, or from host memory. "
            "`decode_wait`: no place in the batch. `append_prefill`: prefill of a question on a session. "
            "`recompute`: dense prefill of the blocks that the question attends to.",
            "s",
            [Query(_parts(_DECODE), "{{part}}")],
            stacked=True,
        ),
    ),
)
LENGTHS = Row(
    "By prompt length",
    (
        Panel(
            "Time to first token, 95%",
            f"By length. {_LENGTHS}",
            "s",
            [Query(_lengths(quantile(0.95, _TTFT, "prompt")), "{{prompt}}")],
            levels=_OBJECTIVE,
            columns=12,
        ),
        Panel(
            "First tokens",
            f"A second, by length. {_LENGTHS}",
            "reqps",
            [Query(_lengths(rate(f"{_TTFT}_count", "prompt")), "{{prompt}}")],
            stacked=True,
            columns=12,
        ),
        Panel(
            "Parts by length",
            f"Mean seconds of a request, in the whole time range. {_LENGTHS}",
            "s",
            [
                Query(_lengths(increase(f"{_TTFT}_count", "prompt", window=RANGE)), "first tokens", "short"),
                Query(_lengths(mean(_TTFT, "prompt", window=RANGE)), "time to first token"),
                *(
                    Query(_lengths(f"{rate(_PARTS, 'prompt', parts, RANGE)} / {_COUNT}"), name)
                    for name, parts in _KINDS.items()
                ),
            ],
            kind="table",
            key="prompt",
            columns=24,
        ),
    ),
)
WAITS = Row(
    "What requests wait for",
    (
        Panel(
            "Waiting for a prefill group",
            "From a job's arrival to its first chunk. If long, add groups or use a sparser method.",
            "s",
            [Query(quantile(q, "request_queue_time_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
            levels=((60.0, "red"),),
        ),
        Panel(
            "Reading the prompt",
            "Time from the first chunk's start to the last stage's end.",
            "s",
            [Query(quantile(q, "request_prefill_time_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
        ),
        Panel(
            "Pulling the KV cache",
            "Time of one prompt's hand-off on its decode worker, mostly during prefill.",
            "s",
            [Query(quantile(q, "handoff_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
        ),
    ),
)
DASHBOARD = Dashboard(
    "ttft",
    "Time to first token",
    "Its distribution, its parts, and both by prompt length.",
    (HOW_LONG, PARTS, LENGTHS, WAITS),
)
