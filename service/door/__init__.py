"""The edge of the service: who may call, what is asked, and the wire."""
