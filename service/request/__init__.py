"""A request's life, free of protobuf and gRPC. Start at `handler.py` and `run/request_run.py`."""
