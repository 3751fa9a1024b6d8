"""Alerts and recording rules: promtool tests each alert firing and not firing, and all metrics exist."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deltafront.service import metrics
from deltafront.service.errors import Code
from deltafront.workers.messages.states import DECODE_PREFIX

from ..test_generated import declared_series
from .manifests import KUBERNETES, ROOT, Object

RULES = KUBERNETES / "monitoring" / "rules.yaml"
ALERTS = Path(__file__).parent / "alerts.yaml"


def spec() -> Object:
    content: Object = yaml.safe_load(RULES.read_text())["spec"]
    return content


def rules() -> Iterator[Object]:
    for group in spec()["groups"]:
        yield from group["rules"]


def runbook(alert: str) -> str:
    return f"docs/alerts.md#{alert.lower()}"


def promtool(folder: Path, *arguments: str) -> None:
    """Return a function that runs promtool in a folder with the rules as a plain `rules.yaml`."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    (folder / "rules.yaml").write_text(yaml.safe_dump(spec()))
    command = ["promtool", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    promtool(tmp_path, "check", "rules", "rules.yaml")


def test_alerts_fire_exactly_when_expected(tmp_path: Path) -> None:
    """Rules are evaluated at each sample of a case. Some cases last 30 hours."""
    cases = yaml.safe_load(ALERTS.read_text())["tests"]
    for one in itertools.chain.from_iterable(case["alert_rule_test"] for case in cases):
        for alert in one["exp_alerts"]:
            page = {"runbook_url": runbook(one["alertname"])}
            alert["exp_annotations"] = alert["exp_annotations"] | page
    files = []
    for interval in sorted({case["interval"] for case in cases}):
        tests = [case for case in cases if case["interval"] == interval]
        content = {"rule_files": ["rules.yaml"], "evaluation_interval": interval, "tests": tests}
        (tmp_path / f"{interval}.yaml").write_text(yaml.safe_dump(content))
        files.append(f"{interval}.yaml")
    promtool(tmp_path, "test", "rules", *files)


def test_every_alert_is_tested_firing_and_silent() -> None:
    tried: dict[str, set[bool]] = {}
    for case in yaml.safe_load(ALERTS.read_text())["tests"]:
        for one in case["alert_rule_test"]:
            tried.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert tried == {rule["alert"]: {True, False} for rule in rules() if "alert" in rule}


def test_rules_query_only_existing_metrics() -> None:
    expressions = " ".join(rule["expr"] for rule in rules())
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set(re.findall(r"deltafront:[\w:]+", expressions)) == recorded
    assert set(re.findall(r"\bdeltafront_\w+", expressions)) <= declared_series()
    outcomes = {
        name for match in re.findall(r'outcome=~?"([^"]+)"', expressions) for name in match.split("|")
    }
    assert outcomes <= set(Code)
    assert {float(bound) for bound in re.findall(r'le="([\d.]+)"', expressions)} <= set(metrics._SECONDS)
    assert re.findall(r'worker=~"([^.]+)\.\+"', expressions) == [DECODE_PREFIX]


def test_operations_guide_names_only_existing_metrics() -> None:
    named = set(re.findall(r"\bdeltafront_\w+", (ROOT / "docs" / "operations.md").read_text()))
    series = declared_series()
    assert named and named <= {*series, *(name.removesuffix("_count") for name in series)}


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule["alert"]
            assert rule["annotations"]["runbook_url"] == runbook(rule["alert"])
            assert rule["labels"]["severity"] in ("critical", "warning") and rule["for"]


def test_runbook_says_for_every_alert_where_to_look_and_what_to_do() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [rule["alert"] for rule in rules() if "alert" in rule]
    for alert, text in sections.items():
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert text.count(part) == 1, (alert, part)
    named = set(re.findall(r"\bdeltafront_\w+", page))
    series = declared_series()
    assert named and named <= {*series, *(name.removesuffix("_count") for name in series)}
