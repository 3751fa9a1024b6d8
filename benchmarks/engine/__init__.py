"""The service at the size it is for: a model of a given shape with random weights, measured through gRPC."""
