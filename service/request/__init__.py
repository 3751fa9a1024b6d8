"""Handles requests from acceptance to outcome, without protobuf and gRPC. Start at `handler.py` and
`run/request_run.py`."""
