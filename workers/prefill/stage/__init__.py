"""One stage of a prefill group: runs a chunk through its layers and sends its KV to a decode worker.

Start at `stage` (`load_stage`: model, `warm_up`, pages). It computes a `chunk`, times it with `phases`, and
sends hidden states to the next stage by `activations`.
"""
