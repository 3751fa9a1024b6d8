"""The decode dashboard: speed, batches, answers, sessions, the prefix cache and pages."""

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
    ratio,
    share,
    total,
)

_NO_PLACE = 'part="decode_wait"'
_APPEND = 'part="append_prefill"'
_TTFT = "time_to_first_token_seconds_count"

PACE = Row(
    "Pace",
    (
        Panel(
            "Between two tokens",
            "As the door sees them leave a worker. A high 99%: prefill of appended text or first tokens "
            "come in between.",
            "s",
            [Query(quantile(q, "inter_token_latency_seconds"), f"{q:.0%}") for q in (0.5, 0.95, 0.99)],
        ),
        Panel(
            "Distribution",
            "Times between tokens, by their length.",
            "s",
            [Query(increase("inter_token_latency_seconds_bucket", "le"), "{{le}}")],
            kind="heatmap",
        ),
        Panel(
            "Time per output token",
            "Mean time per token of an answer, after its first token.",
            "s",
            [Query(quantile(q, "request_time_per_output_token_seconds"), f"{q:.0%}") for q in (0.5, 0.95)]
            + [Query(mean("request_time_per_output_token_seconds"), "mean")],
        ),
        Panel(
            "Tokens generated",
            "Tokens per second of answers that have ended.",
            "short",
            [Query(rate("generation_tokens_total"), "tokens a second")],
        ),
        Panel(
            "Batch size",
            "Mean number of requests in a decode step. At `decode.max_batch` requests wait for a place.",
            "short",
            [Query(share(rate("decode_rows_total"), rate("decode_steps_total")), "requests a step")],
        ),
        Panel(
            "Waiting for a place in the batch",
            "Mean seconds of a first token. If above 0, raise `decode.max_batch` or add workers.",
            "s",
            [Query(share(rate("ttft_part_seconds_total", where=_NO_PLACE), rate(_TTFT)), "waited")],
            levels=((1.0, "orange"),),
        ),
    ),
)
ANSWERS = Row(
    "Answers",
    (
        Panel(
            "Lengths",
            "Answers by number of tokens.",
            "short",
            [Query(increase("request_generation_tokens_bucket", "le"), "{{le}}")],
            kind="heatmap",
        ),
        Panel(
            "Why they ended",
            "`length`: max_tokens or the model's positions cut them. `stop`: the model ended them. "
            "`stop_string`: a string that was asked for.",
            "reqps",
            [Query(rate("finish_reasons_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        Panel(
            "Pages attended",
            "Of the pages held, in layers that attend to selected pages only. 100%: contexts are short, or "
            "requests ask for full attention.",
            "percentunit",
            [Query(ratio("pages_attended_total", "pages_held_total"), "attended")],
        ),
    ),
)
SESSIONS = Row(
    "Sessions and pages",
    (
        Panel(
            "Sessions held",
            "Sessions by decode worker. Each keeps a document's KV cache until its lease ends.",
            "short",
            [Query(by_worker("sessions", DECODERS), "{{worker}}")],
            stacked=True,
        ),
        Panel(
            "KV cache pages in use",
            "By decode worker: pages of requests and sessions. Pages that only the prefix cache has count as "
            "free.",
            "percentunit",
            [Query(by_worker("kv_cache_usage_ratio", DECODERS), "{{worker}}")],
            levels=((0.8, "orange"), (0.95, "red")),
        ),
        Panel(
            "Pages free",
            "By decode worker, of 16 tokens each: what the next documents may take. Above the lines there is "
            "room for a document of 32K, and for one of 128K.",
            "short",
            [Query(by_worker("kv_pages_free", DECODERS), "{{worker}}")],
            levels=((0.0, "red"), (2048.0, "orange"), (8192.0, "green")),
        ),
        Panel(
            "State slots in use",
            "By decode worker: slots that requests and sessions hold, of models with linear attention or "
            "rolling buffers (`decode.state_slots`). 0 for others. At 1 new requests wait.",
            "percentunit",
            [
                Query(
                    f"({by_worker('state_slots', DECODERS)} - {by_worker('state_slots_free', DECODERS)}) / "
                    f"clamp_min({by_worker('state_slots', DECODERS)}, 1)",
                    "{{worker}}",
                )
            ],
            levels=((0.8, "orange"), (0.95, "red")),
        ),
        Panel(
            "Prompt tokens from cache",
            "Share of all prompt tokens that a session or the prefix cache had, without prefill.",
            "percentunit",
            [
                Query(
                    f"{rate('cached_tokens_total', 'source')} / on () group_left () "
                    f"{rate('request_prompt_tokens_sum')}",
                    "{{source}}",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Prefix cache",
            "Cached blocks by decode worker. New documents evict blocks that no request uses.",
            "bytes",
            [
                Query(
                    f"{by_worker('kv_pages_remembered', DECODERS)} * {by_worker('kv_page_bytes', DECODERS)}",
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            "Pages evicted",
            "By decode worker, since its start, the least recently used first. Retained pages "
            "(`retain_s`) are evicted only when nothing else is left.",
            "short",
            [
                Query(by_worker("kv_pages_evicted", DECODERS), "{{worker}}"),
                Query(by_worker("kv_pages_evicted_retained", DECODERS), "{{worker}} retained"),
                Query(by_worker("states_evicted", DECODERS), "{{worker}} states"),
            ],
        ),
        Panel(
            "Age of evicted pages",
            "By decode worker: mean time since their last use. Where clients come back later than that, "
            "the prefix cache is too small.",
            "s",
            [
                Query(
                    f"{by_worker('kv_evicted_age_seconds', DECODERS)} / "
                    f"clamp_min({by_worker('kv_pages_evicted', DECODERS)}, 1)",
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            "Prefill of appended text",
            "Mean seconds of a first token: prefill of a question or a prompt's rest by a decode worker.",
            "s",
            [Query(share(rate("ttft_part_seconds_total", where=_APPEND), rate(_TTFT)), "read")],
        ),
        Panel(
            "Prefill speed after a prefix hit",
            "Recent tokens a second: prefill by decode workers, and KV cache that returns to stages that "
            "prefill a long rest. Doors choose by both.",
            "short",
            [
                Query(by_worker("append_tokens_per_second", DECODERS), "{{worker}} reads"),
                Query(by_worker("kv_fetch_tokens_per_second", GROUPS), "{{worker}} fetches"),
            ],
        ),
        Panel(
            "Prompt tokens recomputed",
            "Mean of an answer: tokens of a sparsely prefilled prompt, in blocks that the question "
            "attends to. 0: no request asks for it (`decode.recompute_blocks`).",
            "short",
            [
                Query(
                    share(rate("recomputed_tokens_total"), rate("request_generation_tokens_count")),
                    "computed again",
                )
            ],
        ),
        Panel(
            "Requests in decode workers",
            "Requests that run, and that wait for pages, KV cache or a place in the batch.",
            "short",
            [
                Query(total("num_requests_running", DECODERS), "running"),
                Query(total("num_requests_waiting", DECODERS), "waiting"),
            ],
            stacked=True,
        ),
        Panel(
            "Lengths, whole time range",
            "Mean tokens of an answer, and of a prompt including its cached tokens.",
            "short",
            [
                Query(mean("request_generation_tokens", window=RANGE), "tokens of an answer"),
                Query(mean("request_prompt_tokens", window=RANGE), "tokens of a prompt"),
            ],
            kind="stat",
        ),
    ),
)


def _tier(name: str) -> str:
    return by_worker(f"kv_tier_{name}", DECODERS, "tier")


_LEGEND = "{{worker}} {{tier}}"
TIERS = Row(
    "Host memory and disk",
    (
        Panel(
            "KV cache in host memory and on disk",
            "By decode worker and tier (`decode.host_cache_gib`, `decode.store`). Its hits are in "
            "*Prompt tokens from cache*.",
            "bytes",
            [Query(f"{_tier('pages')} * {_tier('page_bytes')}", _LEGEND)],
        ),
        Panel(
            "Host memory and disk in use",
            "Share of a tier's pages in use. A full tier from which nothing is loaded is useless.",
            "percentunit",
            [Query(f"{_tier('pages')} / {_tier('room_pages')}", _LEGEND)],
        ),
        Panel(
            "Brought back",
            "Bytes a second while something comes back, since the worker's start: into pages on the GPU from "
            "host memory, into host memory from disk.",
            "Bps",
            [
                Query(
                    f"{_tier('back_pages')} * {_tier('page_bytes')} / "
                    f"clamp_min({_tier('back_seconds')}, 1e-6)",
                    _LEGEND,
                )
            ],
        ),
        Panel(
            "Pages evicted from host memory and disk",
            "Since the worker's start, the least recently used first. Retained pages are evicted only when "
            "nothing else is left.",
            "short",
            [
                Query(_tier("evicted_pages"), _LEGEND),
                Query(or_zero(f"sum({_tier('evicted_retained_pages')})"), "retained, all workers"),
                Query(or_zero(f"sum({_tier('evicted_states')})"), "states, all workers"),
            ],
        ),
        Panel(
            "Pages missed in host memory and on disk",
            "Since the worker's start: gone before they were copied to host memory, or not saved or not "
            "readable on disk.",
            "short",
            [Query(_tier("missed_pages"), _LEGEND)],
        ),
        Panel(
            "Age when evicted from host memory and disk",
            "Mean time since evicted blocks were used. If clients come back later, the tier is too small.",
            "s",
            [
                Query(
                    f"{_tier('evicted_age_seconds')} / clamp_min({_tier('evicted_pages')}, 1)",
                    _LEGEND,
                )
            ],
        ),
    ),
)
DASHBOARD = Dashboard(
    "decode",
    "Decode and sessions",
    "Pace, batches and answers; sessions, the prefix cache, and the pages of both.",
    (PACE, ANSWERS, SESSIONS, TIERS),
)
