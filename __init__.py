"""Deltafront: a distributed long-context prefill service."""

__version__ = "0.1.0"
