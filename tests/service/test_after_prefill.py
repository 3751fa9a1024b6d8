"""Tests what a door expects between the end of prefill and the first token."""

from __future__ import annotations

from deltafront.service.request.after_prefill import AfterPrefill


def test_the_last_requests_median_counts_by_recomputed_blocks() -> None:
    after = AfterPrefill()
    assert after.expected_s(0) == after.expected_s(32) == 0.0
    for seconds in (0.02, 9.0, 0.03):  # a kernel was compiled in between
        after.record(0, seconds)
    after.record(32, 0.3)
    assert (after.expected_s(0), after.expected_s(32), after.expected_s(8)) == (0.03, 0.3, 0.0)
    for _ in range(9):
        after.record(0, 0.05)
    assert after.expected_s(0) == 0.05
    for _ in range(16):
        after.record(0, 0.01)
    assert after.expected_s(0) == 0.01
