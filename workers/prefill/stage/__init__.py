"""A pipeline stage of a prefill group: runs chunks through its layers and sends their KV to decode workers.

Start at `stage`. It runs each `chunk`, times it with `phases`, and sends hidden states to the next stage by
`activations`. `warm_up` compiles the kernels.
"""
