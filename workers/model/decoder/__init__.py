"""The layers of a model and the one loop over them.

Begin at `load.py`: it makes a `LayerStack`. `stack.py` has the layer and the loop, `rope_angles.py` the
rotations. `recompute.py` computes blocks of a sparse prompt again, `compute_thread.py` sets up who computes.
"""
