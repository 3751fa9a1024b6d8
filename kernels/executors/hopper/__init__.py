"""FlashAttention for Hopper, in Gluon.

Start at `attention.py`, which tells the whole, then `items.py` and `softmax.py`.
"""
