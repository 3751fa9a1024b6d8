"""FlashAttention for Hopper, in Gluon.

Start at `attention.py`, which gives an overview, then `items.py` and `softmax.py`.
"""
