"""The overview dashboard: objectives, traffic, errors, saturation."""

from __future__ import annotations

from deltafront.dashboards.grafana import Dashboard, Panel, Query, Row
from deltafront.dashboards.promql import (
    DECODERS,
    GROUPS,
    RANGE,
    by_worker,
    increase,
    mean,
    or_zero,
    quantile,
    rate,
    recorded,
    share,
    total,
)

SLOW_BUDGET, ERROR_BUDGET = 0.05, 0.01
"""The permitted shares of first tokens after more than 30 s, and of requests that fail through the service's
fault (the objectives in deploy/kubernetes/monitoring/rules.yaml)."""
_BURNING = ((1.0, "orange"), (6.0, "red"))
IN_TIME = 'le="30.0"'
OURS, REFUSED = 'outcome=~"internal|unavailable"', 'outcome="resource_exhausted"'
THEIRS = 'outcome!~"finished|internal|unavailable|resource_exhausted"'

OUTCOMES = {
    "finished": "green",
    "internal": "red",
    "unavailable": "dark-red",
    "unknown": "super-light-red",
    "resource_exhausted": "orange",
    "deadline_exceeded": "yellow",
    "invalid_argument": "blue",
    "not_found": "super-light-blue",
    "unauthenticated": "purple",
    "cancelled": "super-light-purple",
}
"""Colours. Errors of the service are red."""
LINES = {"completed": "green", "failed": "red"}


def _burn(rule: str, window: str, budget: float) -> Query:
    burnt = recorded(f"{rule}:ratio_rate{window}")  # NaN without requests
    return Query(f"{or_zero(f'max({burnt} >= 0)')} / {budget}", window)


OBJECTIVES = Row(
    "Objectives",
    (
        Panel(
            "First tokens within 30 s",
            "In the whole time range. The objective is 95%. When it is missed, the dashboard on the "
            "time to first token says which part took it.",
            "percentunit",
            [
                Query(
                    rate("time_to_first_token_seconds_bucket", where=IN_TIME, window=RANGE)
                    + " / "
                    + rate("time_to_first_token_seconds_count", window=RANGE)
                )
            ],
            kind="stat",
            levels=((0.0, "red"), (1 - SLOW_BUDGET, "green")),
            columns=6,
        ),
        Panel(
            "Requests without an error of the service",
            "Share of requests without an error of the service, in the time range. The objective is 99%.",
            "percentunit",
            [
                Query(
                    "1 - "
                    + share(
                        rate("requests_total", where=OURS, window=RANGE),
                        rate("requests_total", window=RANGE),
                    )
                )
            ],
            kind="stat",
            levels=((0.0, "red"), (1 - ERROR_BUDGET, "green")),
            columns=6,
        ),
        Panel(
            "Prefill groups that serve",
            "Groups that answer and take new prompts. None: every prompt waits, then is refused as "
            "unavailable.",
            "short",
            [
                Query(
                    or_zero(f"sum({by_worker('worker_up', GROUPS)} - {by_worker('worker_draining', GROUPS)})")
                )
            ],
            kind="stat",
            levels=((0.0, "red"), (1.0, "green")),
            columns=6,
        ),
        Panel(
            "Decode workers that serve",
            "Workers that answer and take new prompts. Their sessions die with them.",
            "short",
            [
                Query(
                    or_zero(
                        f"sum({by_worker('worker_up', DECODERS)} - {by_worker('worker_draining', DECODERS)})"
                    )
                )
            ],
            kind="stat",
            levels=((0.0, "red"), (1.0, "green")),
            columns=6,
        ),
        Panel(
            "Budget burnt by slow first tokens",
            "Share of first tokens over 30 s, divided by the objective's 5%. At 1 a month's budget lasts a "
            "month; above 14.4 over 1 h, or 6 over 6 h, an alert fires.",
            "short",
            [_burn("slow_first_tokens", window, SLOW_BUDGET) for window in ("5m", "30m", "1h", "6h")],
            levels=_BURNING,
            columns=12,
        ),
        Panel(
            "Budget burnt by errors",
            "Share of requests that fail by the service's fault, divided by the objective's 1%. Alerts as "
            "for slow first tokens.",
            "short",
            [_burn("errors", window, ERROR_BUDGET) for window in ("5m", "30m", "1h", "6h")],
            levels=_BURNING,
            columns=12,
        ),
    ),
)
TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by outcome",
            "All calls by outcome. `resource_exhausted` is a refusal for load, with a retry time.",
            "reqps",
            [Query(rate("requests_total", "outcome"), "{{outcome}}", colour=OUTCOMES)],
            stacked=True,
        ),
        Panel(
            "Tokens",
            "In: prompt tokens. Held: those from a session or the prefix cache. Out: generated tokens.",
            "short",
            [
                Query(rate("request_prompt_tokens_sum"), "in, a second"),
                Query(rate("cached_tokens_total"), "held, a second"),
                Query(rate("generation_tokens_total"), "out, a second"),
            ],
        ),
        Panel(
            "Prompt lengths",
            "Requests by prompt length, including a session's tokens.",
            "short",
            [Query(increase("request_prompt_tokens_bucket", "le"), "{{le}}")],
            kind="heatmap",
        ),
    ),
)
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "Time from a request's arrival at the door to its first token, including tokenising.",
            "s",
            [Query(quantile(q, "time_to_first_token_seconds"), f"{q:.0%}") for q in (0.5, 0.95, 0.99)]
            + [Query(mean("time_to_first_token_seconds"), "mean")],
            levels=((30.0, "red"),),
        ),
        Panel(
            "Time per output token",
            "Time per token after the first. It rises with the batch size; see the dashboard on decode.",
            "s",
            [Query(quantile(q, "request_time_per_output_token_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
        ),
        Panel(
            "Whole requests",
            "Time from arrival to the last event, 95th percentile, by call.",
            "s",
            [Query(quantile(0.95, "e2e_request_latency_seconds", "method_rpc"), "{{method_rpc}}")],
        ),
    ),
)
ERRORS = Row(
    "Errors",
    (
        Panel(
            "Share that fails or is refused",
            "Failures of the service (internal, unavailable), and refusals for load (resource_exhausted).",
            "percentunit",
            [
                Query(
                    share(rate("requests_total", where=OURS), rate("requests_total")),
                    "the service's fault",
                    colour="red",
                ),
                Query(
                    share(rate("requests_total", where=REFUSED), rate("requests_total")),
                    "refused for load",
                    colour="orange",
                ),
            ],
            levels=((ERROR_BUDGET, "orange"), (0.05, "red")),
        ),
        Panel(
            "Attempts repeated, hand-offs failed",
            "In an hour. A worker died or failed under a request, which was tried again elsewhere: look at "
            "pods that restart. A hand-off fails when KV cache does not reach its decode worker.",
            "short",
            [
                Query(increase("replays_total", window="1h"), "attempts repeated", colour="red"),
                Query(
                    increase("handoff_failures_total", window="1h"),
                    "hand-offs failed",
                    colour="super-light-red",
                ),
            ],
            levels=((1.0, "orange"), (3.0, "red")),
        ),
        Panel(
            "What callers did wrong",
            "Calls per second that were invalid, cancelled, or past their deadline.",
            "reqps",
            [Query(rate("requests_total", "outcome", THEIRS), "{{outcome}}", colour=OUTCOMES)],
        ),
    ),
)
CALLERS = Row(
    "Callers",
    (
        Panel(
            "Tokens by caller",
            "Tokens a second of prompts (cached ones included), cached ones, and of answers. Callers without "
            "a name in `door.tokens_file` are `others`.",
            "short",
            [Query(rate("caller_tokens_total", "caller, kind"), "{{caller}}, {{kind}}")],
            columns=12,
        ),
        Panel(
            "Requests by caller",
            "Calls of each caller by outcome. `resource_exhausted`: over its limits, or refused for load.",
            "reqps",
            [Query(rate("caller_requests_total", "caller, outcome"), "{{caller}}, {{outcome}}")],
            columns=12,
        ),
        Panel(
            "Lines of batches",
            "Lines a second that batches have answered (`door.batches`). A failed one is in the error file.",
            "short",
            [Query(rate("batch_lines_total", "outcome"), "{{outcome}}", colour=LINES)],
            columns=12,
        ),
    ),
)
SATURATION = Row(
    "Saturation",
    (
        Panel(
            "KV cache pages in use",
            "Share of pages in use, by worker. If decode workers are full, shorten leases or add workers.",
            "percentunit",
            [Query(by_worker("kv_cache_usage_ratio"), "{{worker}}")],
            levels=((0.8, "orange"), (0.95, "red")),
        ),
        Panel(
            "Time that the queue takes",
            "Tokens that wait for prefill in a group, over its recent tokens a second. Long: more "
            "groups, more stages, or a sparser method.",
            "s",
            [
                Query(
                    f"{by_worker('queue_tokens', GROUPS)} / {by_worker('prefill_tokens_per_second', GROUPS)}",
                    "{{worker}}",
                )
            ],
            levels=((15.0, "orange"), (60.0, "red")),
        ),
        Panel(
            "Requests in the workers",
            "Requests that run, and that wait there.",
            "short",
            [
                Query(total("num_requests_running"), "running"),
                Query(total("num_requests_waiting"), "waiting"),
                Query(total("sessions"), "sessions held"),
            ],
        ),
    ),
)
DASHBOARD = Dashboard(
    "overview",
    "Overview",
    "Objectives, traffic, errors and saturation of the whole service.",
    (OBJECTIVES, TRAFFIC, CALLERS, LATENCY, ERRORS, SATURATION),
)
