"""A decode worker: continuous batching over paged K/V, with DELTA page selection."""
