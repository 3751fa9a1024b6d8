"""One request's run. Start at `request_run.py`."""
