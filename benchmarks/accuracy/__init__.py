"""Compares the answers of prefill methods with those of dense attention on the same documents."""
