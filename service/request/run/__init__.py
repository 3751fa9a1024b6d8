"""Executes one request end to end (entry point: `request_run.py`)."""
