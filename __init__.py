"""Deltafront: a distributed long-context prefill service."""
