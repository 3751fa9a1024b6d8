"""The protocols of a door: gRPC (`grpc_door.py`), OpenAI's HTTP (`http_door.py`), and authentication
(`auth.py`).
"""
