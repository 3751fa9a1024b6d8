"""One request's run: `request_run.py` is where it begins."""
