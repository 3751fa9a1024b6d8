"""Queries in PromQL over Deltafront's series, all within the dashboard's namespace and model."""

from __future__ import annotations

PREFIX = "deltafront_"
SELECTOR = 'namespace=~"$namespace",model_name=~"$model"'
NAMESPACE = 'namespace=~"$namespace"'
NOW = "$__rate_interval"
"""Of a panel that shows how something went: as short as the scrapes allow."""
RANGE = "$__range"
"""Of a panel that shows one number: all that is on the screen."""


def series(name: str, where: str = "") -> str:
    """where: further matchers, as `part="queue"`."""
    return f"{PREFIX}{name}{{{SELECTOR}{',' * bool(where)}{where}}}"


def recorded(name: str) -> str:
    """One of the recording rules of deploy/kubernetes/monitoring/rules.yaml."""
    return f"deltafront:{name}{{{SELECTOR}}}"


def of_serve(name: str) -> str:
    """A series of Ray Serve's own, which knows no model."""
    return f"ray_serve_{name}{{{NAMESPACE}}}"


def _over(function: str, name: str, by: str, where: str, window: str) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({function}({series(name, where)}[{window}]))"


def rate(name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """A second, of all doors."""
    return _over("rate", name, by, where, window)


def increase(name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    return _over("increase", name, by, where, window)


def ratio(above: str, below: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Of two counters."""
    return f"{rate(above, by, where, window)} / {rate(below, by, where, window)}"


def mean(name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Of what a histogram observed."""
    return ratio(f"{name}_sum", f"{name}_count", by, where, window)


def quantile(q: float, name: str, by: str = "", where: str = "", window: str = NOW) -> str:
    """Of a histogram."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q}, {rate(name + '_bucket', labels, where, window)})"


def in_order(expr: str, label: str, digits: int = 3) -> str:
    """With the numbers that a label's values begin with filled up to so many digits: whoever sorts by the
    label sorts by number."""
    for missing in range(1, digits):
        number = f"([0-9]{{{digits - missing}}}[^0-9]*)"
        expr = f'label_replace({expr}, "{label}", "{"0" * missing}$1", "{label}", "{number}")'
    return expr


def by_worker(gauge: str, where: str = "", also: str = "") -> str:
    """One value for each worker, and each value of the label `also`, however many doors tell of it."""
    labels = ", ".join(filter(None, ("worker", also)))
    return f"max by ({labels}) ({series(gauge, where)})"


GROUPS = 'worker=~"prefill:.+"'
DECODERS = 'worker=~"decode:.+"'
