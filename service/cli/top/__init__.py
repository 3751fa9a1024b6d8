"""`deltafront top`: shows what a service does, from its Prometheus metrics."""
