"""Exact causal attention over every key."""
