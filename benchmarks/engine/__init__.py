"""Measures the service through gRPC, with a model of a given shape and random weights."""
