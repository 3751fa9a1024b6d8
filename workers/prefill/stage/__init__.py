"""One stage of a prefill group: a chunk passes through its layers, and its K/V leaves for a decode worker.

Start at `stage` (`load_stage`: model, `warm_up`, pages). It computes a `chunk`, times it with `phases`, and
passes it on by `activations`.
"""
