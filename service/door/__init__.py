"""The edges: gRPC (`grpc_door.py`) and OpenAI's HTTP (`http_door.py`); who may call (`auth.py`)."""
