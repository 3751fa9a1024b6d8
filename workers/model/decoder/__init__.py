"""A model's decoder layers and the loop over them. `load` makes a `LayerStack` (in `stack`)."""
