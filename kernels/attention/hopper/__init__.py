"""FlashAttention for Hopper, in Gluon.

Start with the overview in `attention.py`, then read `items.py` and `softmax.py`.
"""
