"""The layers of a model and the one loop over them. `load` makes the `LayerStack` of `stack`."""
