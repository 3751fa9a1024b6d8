"""The life of a request, from text to its last event; knows neither protobuf nor gRPC."""
