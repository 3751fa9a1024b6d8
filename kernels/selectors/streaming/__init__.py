"""Sink and window, without looking at q or k (StreamingLLM)."""
