"""Accounting of KV pages, without tensors: the pool, requests' pages, sessions, and the prefix cache's
tiers."""
