"""One stage of a prefill group: a chunk passes through its layers, and its K/V leaves for a decode worker.

Walk it from `loading` (model, `warm_up`, pages) to `stage`, which computes a `chunk` with `chunk_attention`,
times it with `phases`, and passes it on by `activations` or `peer_activations`. `chunk_cost` plans chunks.
"""
