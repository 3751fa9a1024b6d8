"""A request's life, free of protobuf and gRPC."""
