"""PromQL queries of Deltafront's series, limited to the dashboard's namespace and model."""

from __future__ import annotations

PREFIX = "deltafront_"
SELECTOR = 'namespace=~"$namespace",model_name=~"$model"'
NAMESPACE = 'namespace=~"$namespace"'
NOW = "$__rate_interval"
"""The rate window of a panel over time: as short as the scrape interval permits."""
RANGE = "$__range"
"""The rate window of a panel with one number: the dashboard's whole time range."""


def series(name: str, where: str = "") -> str:
    """Select a series. where: further matchers, such as `part="queue"`."""
    return f"{PREFIX}{name}{{{SELECTOR}{',' * bool(where)}{where}}}"


def recorded(name: str) -> str:
    """Select a recording rule of deploy/kubernetes/monitoring/rules.yaml."""
    return f"deltafront:{name}{{{SELECTOR}}}"


def of_serve(name: str) -> str:
    """Select a series of Ray Serve. Serve's series have no model label."""
    return f"ray_serve_{name}{{{NAMESPACE}}}"


def of_dcgm(name: str) -> str:
    """Select a series of NVIDIA's dcgm-exporter by node and GPU.

    A scrape that keeps the exporter's labels has the namespace of a GPU's pod in `namespace`; others, such as
    the GPU operator's, rename it.
    """
    series = f"DCGM_FI_DEV_{name}"
    kept = f'{series}{{{NAMESPACE},exported_namespace=""}}'
    renamed = f"{series}{{exported_{NAMESPACE}}}"
    return f"max by (Hostname, gpu) ({renamed} or {kept})"


def _over(function: str, name: str, by: str, where: str, window: str) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({function}({series(name, where)}[{window}]))"


def rate(name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Sum the rate per second over all doors."""
    return _over("rate", name, by, where, window)


def increase(name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    return _over("increase", name, by, where, window)


def ratio(above: str, below: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Divide the rates of two counters."""
    return f"{rate(above, by, where, window)} / {rate(below, by, where, window)}"


def or_zero(expr: str) -> str:
    """Return 0 where `expr` has no series, so that Grafana draws a line and no gap."""
    return f"({expr} or vector(0))"


def share(above: str, below: str) -> str:
    """Divide two rates. Without requests the result is 0, not 0 / 0."""
    return f"{or_zero(above)} / clamp_min({or_zero(below)}, 1e-9)"


def mean(name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Compute a histogram's mean."""
    return ratio(f"{name}_sum", f"{name}_count", by, where, window)


def quantile(q: float, name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Compute a histogram's quantile."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q}, {rate(name + '_bucket', labels, where, window)})"


def in_order(expr: str, label: str, digits: int = 3) -> str:
    """Pad the number at the beginning of a label's values to `digits` digits, so that the values sort by
    number."""
    for missing in range(1, digits):
        number = f"([0-9]{{{digits - missing}}}[^0-9]*)"
        expr = f'label_replace({expr}, "{label}", "{"0" * missing}$1", "{label}", "{number}")'
    return expr


def by_worker(gauge: str, where: str = "", also: str = "") -> str:
    """Deduplicate what several doors report: one value for each worker and value of the label `also`."""
    labels = ", ".join(filter(None, ("worker", also)))
    return f"max by ({labels}) ({series(gauge, where)})"


def total(gauge: str, where: str = "") -> str:
    """Sum over workers."""
    return or_zero(f"sum({by_worker(gauge, where)})")


GROUPS = 'worker=~"prefill:.+"'
DECODERS = 'worker=~"decode:.+"'
