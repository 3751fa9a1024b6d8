"""The prefill dashboard: groups and their queues, stages and bubbles, and the hand-off to decode workers."""

from __future__ import annotations

from deltafront.dashboards.grafana import Dashboard, Panel, Query, Row
from deltafront.dashboards.promql import GROUPS, by_worker, in_order, increase, quantile, rate, share, total

_SECONDS = "stage_seconds_total"
_WORKING = 'phase!="activation_wait"'
_HANDOFF = 'phase=~"kv_.+|handoff"'
_WORK = rate(_SECONDS, "stage", _WORKING)
_TTFT = "time_to_first_token_seconds_count"
_BETWEEN = 'part=~"prefill.(other_requests|group_overhead|activation_wait)"'
_EXPOSED = 'part="handoff_exposed"'


def _stages(expr: str) -> Query:
    return Query(in_order(expr, "stage", 2), "stage {{stage}}")


GROUP = Row(
    "Groups",
    (
        Panel(
            "Tokens read",
            "Recent prefill rate by group, from which the queue's time is computed.",
            "short",
            [Query(by_worker("prefill_tokens_per_second", GROUPS), "{{worker}}")],
        ),
        Panel(
            "Queue in tokens",
            "Admitted to a group and not yet prefilled. Autoscaling adds groups by this over the rate. "
            "The lines are one and four documents of 512K; the overview shows the time.",
            "short",
            [Query(by_worker("queue_tokens", GROUPS), "{{worker}}")],
            levels=((524_288.0, "orange"), (2_097_152.0, "red")),
        ),
        Panel(
            "Prompts in the groups",
            "Requests in prefill, and waiting for pages or for their turn.",
            "short",
            [
                Query(total("num_requests_running", GROUPS), "read"),
                Query(total("num_requests_waiting", GROUPS), "waiting"),
            ],
            stacked=True,
        ),
        Panel(
            "Tokens read, by method",
            "Tokens per second of prompts that a group has prefilled completely.",
            "short",
            [Query(rate("prefill_tokens_total", "method"), "{{method}}")],
            stacked=True,
        ),
        Panel(
            "Reading a prompt",
            "Time from a prompt's first chunk to the last stage's end.",
            "s",
            [Query(quantile(q, "request_prefill_time_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
        ),
        Panel(
            "Waiting for a group",
            "Time from a job's arrival to its first chunk's start.",
            "s",
            [Query(quantile(q, "request_queue_time_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
            levels=((60.0, "red"),),
        ),
        Panel(
            "Tokens read again",
            "Tokens per hour that were prefilled in vain, because a worker died.",
            "short",
            [Query(increase("tokens_read_again_total", window="1h"), "tokens", colour="red")],
            levels=((1.0, "orange"),),
        ),
    ),
)
STAGES = Row(
    "Stages and bubbles",
    (
        Panel(
            "Stages that work",
            "Seconds of work a second, by stage, over the groups that are up: 1 is a stage that never idles. "
            "Counted at a prompt's end, so a long prompt shows late and all at once.",
            "percentunit",
            [
                _stages(f"{_WORK} / scalar(sum({by_worker('worker_up', GROUPS)}))"),
            ],
        ),
        Panel(
            "Bubbles",
            "Share of a stage's time with a chunk in which it waited for the stage before. High from one "
            "stage on: the one before it is the slowest, has too many layers or a slow link; high "
            "everywhere: prompts have few chunks.",
            "percentunit",
            [_stages(f"1 - {_WORK} / {rate(_SECONDS, 'stage')}")],
            levels=((0.2, "orange"), (0.5, "red")),
        ),
        Panel(
            "Unevenness",
            "The busiest stage's work divided by the mean, which an even split of the layers would gain.",
            "short",
            [
                Query(
                    f"max({rate(_SECONDS, 'stage', _WORKING)}) / avg({rate(_SECONDS, 'stage', _WORKING)})",
                    "busiest over mean",
                )
            ],
            levels=((1.2, "orange"), (1.5, "red")),
        ),
        Panel(
            "Phases of all stages",
            "Seconds a second. `projection` is the same for every method; `attention` and what chooses its "
            "tiles are on the dashboard on sparsity.",
            "short",
            [Query(rate(_SECONDS, "phase"), "{{phase}}")],
            stacked=True,
        ),
        Panel(
            "Between a prompt's chunks",
            "Mean seconds of a first token that its prompt's last stage waited, ran other requests' chunks, "
            "or that no stage accounts for.",
            "s",
            [
                Query(
                    f"{rate('ttft_part_seconds_total', 'part', _BETWEEN)} / ignoring (part) group_left "
                    f"{rate(_TTFT)}",
                    "{{part}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Launch-bound",
            "Share of a stage's work that was chunks in which the GPU waited for its host's launches, which "
            "hides in the phases. Short prompts always are; of long ones chunks are too short, or the host "
            "is slow or busy with something else. 0 on a CPU.",
            "percentunit",
            [_stages(f"{rate('stage_launch_bound_seconds_total', 'stage')} / {_WORK}")],
            levels=((0.2, "orange"), (0.5, "red")),
        ),
    ),
)
HANDOFF = Row(
    "Hand-off",
    (
        Panel(
            "KV cache handed over",
            "Bytes per second from stages to decode workers.",
            "Bps",
            [Query(rate("handoff_bytes_total"), "bytes a second")],
        ),
        Panel(
            "Pulling one prompt's KV cache",
            "Time of a prompt's hand-off on its decode worker, from the first message to the last.",
            "s",
            [Query(quantile(q, "handoff_seconds"), f"{q:.0%}") for q in (0.5, 0.95)],
        ),
        Panel(
            "Speed of a pull",
            "Bytes divided by the time of pulls: the link's speed for one prompt.",
            "Bps",
            [Query(f"{rate('handoff_bytes_total')} / {rate('handoff_seconds_sum')}", "bytes a second")],
        ),
        Panel(
            "Not hidden by prefill",
            "Mean seconds that a first token waited for KV cache after prefill's end. Near 0 unless the "
            "link is slower than prefill.",
            "s",
            [Query(share(rate("ttft_part_seconds_total", where=_EXPOSED), rate(_TTFT)), "exposed")],
            levels=((0.5, "orange"), (2.0, "red")),
        ),
        Panel(
            "What stages spend on it",
            "Seconds per second spent on writing KV into pages, gathering it, and announcing it.",
            "short",
            [Query(rate(_SECONDS, "phase", _HANDOFF), "{{phase}}")],
            stacked=True,
        ),
        Panel(
            "Hand-offs that failed",
            "In 15 minutes. Each ended an attempt, which was repeated. Decode workers that die, or links "
            "that break: the doors' logs name them.",
            "short",
            [Query(increase("handoff_failures_total", window="15m"), "failed", colour="red")],
            levels=((1.0, "orange"), (3.0, "red")),
        ),
    ),
)
DASHBOARD = Dashboard(
    "prefill",
    "Prefill pipeline",
    "Groups and their queues, stages and bubbles, and the KV hand-off to decode.",
    (GROUP, STAGES, HANDOFF),
)
