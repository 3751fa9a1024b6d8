"""Sends 10,000 random messages to a real service."""

from __future__ import annotations

import time

import pytest

from .conftest import Amount, Record
from .fuzz import fuzz
from .running import Service


@pytest.mark.timeout(24 * 3600)
def test_fuzzed_calls_cause_no_internal_error_and_hold_no_page(
    service: Service, amount: Amount, record: Record
) -> None:
    calls = amount.tries or 10_000
    findings = fuzz(
        [service.address for _ in range(8)], calls, amount.seed, until=time.monotonic() + amount.budget_s
    )
    calls = findings.codes.total()
    with service.client() as client:
        try:
            service.seconds_to_no_page(client, 15.0)
            held = []
        except AssertionError as error:
            held = [f"held {error}"]
    codes = ", ".join(f"{count} {name}" for name, count in findings.codes.most_common())
    print(*findings.bad, *held, sep="\n")
    record("fuzz", calls, len(findings.bad) + len(held), codes)
    assert not findings.bad and not held
