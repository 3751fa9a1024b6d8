"""The sparsity dashboard: time saved by sparse attention and time spent on choosing tiles, by method, layer
and stage."""

from __future__ import annotations

from deltafront.dashboards.grafana import Dashboard, Panel, Query, Row
from deltafront.dashboards.promql import (
    NOW,
    RANGE,
    in_order,
    increase,
    mean,
    or_zero,
    quantile,
    rate,
    ratio,
    series,
)

_METHOD = 'method=~"$method"'
_COMPUTED, _CAUSAL = "attention_tiles_computed_total", "attention_tiles_causal_total"
_SECONDS = "stage_seconds_total"
_ATTENTION = f'{_METHOD},phase="attention"'
_CHOOSING = f'{_METHOD},phase=~"anchors|scoring|selection|correction"'
_BOTH = f'{_METHOD},phase=~"attention|anchors|scoring|selection|correction"'
_OVERHEAD = ((0.5, "orange"), (1.0, "red"))
_DENSE = (
    "What dense attention would have cost is an estimate: the time attention took, times causal over "
    "computed tiles."
)


def _dense(by: str, window: str) -> str:
    """Make the PromQL that estimates dense attention's seconds: measured seconds times causal over computed
    tiles. Series without prompts are left out, since 0 / 0 would make the sum NaN.
    """
    return (
        f"{rate(_SECONDS, by, _ATTENTION, window)} * {rate(_CAUSAL, by, _METHOD, window)}"
        f" / ({rate(_COMPUTED, by, _METHOD, window)} > 0)"
    )


def _a_prompt(seconds: str) -> str:
    return f"({seconds}) / {rate('prefill_prompts_total', 'method', _METHOD, RANGE)}"


BY_METHOD = Row(
    "By method",
    (
        Panel(
            "Methods, whole time range",
            f"Seconds of all stages, a prompt. {_DENSE} Where choosing costs more than is saved, use dense "
            "attention (`min_tokens`).",
            "s",
            [
                Query(increase("prefill_prompts_total", "method", _METHOD, RANGE), "prompts", "short"),
                Query(mean("attention_density_ratio", "method", _METHOD, RANGE), "density", "percentunit"),
                Query(_a_prompt(rate(_SECONDS, "method", _ATTENTION, RANGE)), "attention"),
                Query(_a_prompt(rate(_SECONDS, "method", _BOTH, RANGE)), "with choosing tiles"),
                Query(_a_prompt(_dense("method", RANGE)), "dense, estimated"),
            ],
            kind="table",
            key="method",
            columns=24,
        ),
        Panel(
            "Density",
            "Tiles computed over causal tiles, mean over prompts. Rising: the texts have changed, or the "
            "profile is not the model's.",
            "percentunit",
            [Query(mean("attention_density_ratio", "method", _METHOD), "{{method}}")],
        ),
        Panel(
            "Density of prompts, 95%",
            "The prompts that sparse attention helps least.",
            "percentunit",
            [Query(quantile(0.95, "attention_density_ratio", "method", _METHOD), "{{method}}")],
        ),
        Panel(
            "Measured score",
            "Over dense attention's, of the default setting, as `deltafront evaluate` found it before this "
            "service started.",
            "percentunit",
            [Query(f"max by (setting) ({series('profile_score_ratio')})", "{{setting}}")],
        ),
        Panel(
            "Prompts",
            "Prompts prefilled by groups. Short ones are dense with every method.",
            "reqps",
            [Query(rate("prefill_prompts_total", "method", _METHOD), "{{method}}")],
            stacked=True,
        ),
    ),
)
_DENSE_NATS, _GIVEN_NATS = (f'{_METHOD},reading="{reading}"' for reading in ("dense", "given"))
_NATS = "shadow_nats_total"
_LOST_NATS = (
    f"({rate(_NATS, 'method', _DENSE_NATS)} - {rate(_NATS, 'method', _GIVEN_NATS)})"
    f" / {rate('shadow_tokens_total', 'method', _METHOD)}"
)
QUALITY = Row(
    "Against dense attention (door.shadow)",
    (
        Panel(
            "Agreement with dense attention",
            "Share of an answer's positions where dense attention, after the same tokens, has the same "
            "likeliest token; mean over sampled answers. Rounding alone costs a little. Falling: run "
            "`deltafront evaluate` with such prompts.",
            "percentunit",
            [Query(mean("shadow_agreement_ratio", "method", _METHOD), "{{method}}")],
            absent="no answer was compared",
        ),
        Panel(
            "Log-probability above dense attention",
            "Nats a token: log p(given) - log p(dense), mean over the answers' tokens. At temperature 1, "
            "without top_p and top_k, it estimates KL(given || dense).",
            "short",
            [Query(_LOST_NATS, "{{method}}")],
            absent="no answer was compared",
            signed=True,
        ),
        Panel(
            "Sampled answers",
            "By outcome. `ended`: a request came. `expired`: no worker was idle within ten minutes. "
            "`skipped`: another answer was being compared.",
            "short",
            [Query(increase("shadow_reads_total", "outcome"), "{{outcome}}")],
            stacked=True,
        ),
    ),
)
COST = Row(
    "What it costs and saves",
    (
        Panel(
            "Scoring over attention",
            "Time of anchors, scores and selection over time of attention, by prompt. Above 1, choosing "
            "takes longer than computing.",
            "percentunit",
            [
                Query(quantile(q, "scoring_overhead_ratio", "method", _METHOD), f"{{{{method}}}} {name}")
                for q, name in ((0.5, "median"), (0.95, "95%"))
            ],
            levels=_OVERHEAD,
        ),
        Panel(
            "Attention, and what dense would have cost",
            f"Seconds a second, all stages. {_DENSE}",
            "short",
            [
                Query(or_zero(rate(_SECONDS, where=_ATTENTION)), "attention"),
                Query(or_zero(rate(_SECONDS, where=_CHOOSING)), "choosing tiles"),
                Query(or_zero(f"sum({_dense('method', NOW)})"), "dense would have cost"),
            ],
        ),
        Panel(
            "Time saved",
            "Share of dense attention's estimated time that is saved, after choosing tiles.",
            "percentunit",
            [
                Query(f"1 - {rate(_SECONDS, 'method', _BOTH)} / ({_dense('method', NOW)})", "{{method}}"),
            ],
            levels=((-100.0, "red"), (0.0, "green")),
            signed=True,
        ),
        Panel(
            "Choosing tiles, by step",
            "Seconds per second of all stages for anchors, scores, selection, and the Δ correction.",
            "short",
            [Query(rate(_SECONDS, "phase", _CHOOSING), "{{phase}}")],
            stacked=True,
            columns=12,
        ),
        Panel(
            "Scoring over attention, by stage",
            "Each stage has a range of layers, in their order.",
            "percentunit",
            [
                Query(
                    in_order(
                        f"{rate(_SECONDS, 'stage', _CHOOSING)} / {rate(_SECONDS, 'stage', _ATTENTION)}",
                        "stage",
                        2,
                    ),
                    "stage {{stage}}",
                )
            ],
            levels=_OVERHEAD,
            columns=12,
        ),
    ),
)
_LAYER_SECONDS = "attention_layer_seconds_total"
_IN_ATTENTION, _IN_CHOOSING = (f'{_METHOD},phase="{phase}"' for phase in ("attention", "choosing"))


def _layers(expr: str) -> str:
    return in_order(expr, "layer")


def _seconds(where: str) -> str:
    return rate(_LAYER_SECONDS, "layer", where, RANGE)


def _dense_layer() -> str:
    """Estimate dense attention's seconds by layer, separately for each method with prompts, since times per
    tile differ.
    """
    by = "method, layer"
    return (
        f"sum by (layer) ({rate(_LAYER_SECONDS, by, _IN_ATTENTION, RANGE)}"
        f" * {rate(_CAUSAL, by, _METHOD, RANGE)} / ({rate(_COMPUTED, by, _METHOD, RANGE)} > 0))"
    )


_PROMPTS = f"scalar({rate('prefill_prompts_total', where=_METHOD, window=RANGE)})"
BY_LAYER = Row(
    "By layer",
    (
        Panel(
            "Density by layer over time",
            "Share of causal tiles computed, for the methods chosen above. Early layers usually need most.",
            "percentunit",
            [Query(_layers(ratio(_COMPUTED, _CAUSAL, "layer", _METHOD)), "{{layer}}")],
            kind="heatmap",
            columns=12,
            tall=True,
            cumulative=False,
        ),
        Panel(
            "Density by layer, whole time range",
            "Share of causal tiles that was computed, for the methods chosen above.",
            "percentunit",
            [Query(_layers(ratio(_COMPUTED, _CAUSAL, "layer", _METHOD, RANGE)), "{{layer}}")],
            kind="bargauge",
            key="layer",
            tall=True,
            columns=12,
        ),
        Panel(
            "Choosing over attention, by layer",
            "Time of anchors, scores, selection and correction over time of attention, as measured. Above 1, "
            "choosing takes longer than computing: such a layer may be cheaper dense.",
            "percentunit",
            [Query(_layers(f"{_seconds(_IN_CHOOSING)} / {_seconds(_IN_ATTENTION)}"), "{{layer}}")],
            kind="bargauge",
            key="layer",
            tall=True,
            levels=_OVERHEAD,
        ),
        Panel(
            "Attention by layer, with choosing tiles",
            "Measured seconds per prompt, in the time range.",
            "s",
            [Query(_layers(f"{_seconds(_METHOD)} / {_PROMPTS}"), "{{layer}}")],
            kind="bargauge",
            key="layer",
            tall=True,
        ),
        Panel(
            "Attention by layer, what dense would have cost",
            f"Seconds a prompt, to be compared with those beside. {_DENSE}",
            "s",
            [Query(_layers(f"{_dense_layer()} / {_PROMPTS}"), "{{layer}}")],
            kind="bargauge",
            key="layer",
            tall=True,
        ),
    ),
)
DASHBOARD = Dashboard(
    "sparsity",
    "Sparsity and its overhead",
    "Density, what choosing tiles costs, and what dense attention would have cost, by method, layer and "
    "stage.",
    (BY_METHOD, QUALITY, COST, BY_LAYER),
    variables=(
        (
            "method",
            "Method",
            'label_values(deltafront_prefill_prompts_total{namespace=~"$namespace"}, method)',
        ),
    ),
)
