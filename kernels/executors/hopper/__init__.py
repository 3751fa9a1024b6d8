"""FlashAttention for Hopper, in Gluon.

Start at `attention.py`, which tells the whole; then `items.py` (which tiles), `softmax.py` (one tile's
scores), `buffers.py` (shared memory), `hopper_plan.py` (compile-time choices) and `launch.py`.
"""
