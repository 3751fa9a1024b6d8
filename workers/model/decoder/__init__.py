"""The layers of a model and the one loop over them.

`load.py` makes a `LayerStack`; `stack.py` has the layer and the loop. `recompute.py` computes blocks of a
sparse prompt again.
"""
