"""Delta-KV: attention over packed runs of keys, exact near the diagonal."""
