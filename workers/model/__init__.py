"""A model, from the directory that a user names to layers that compute.

Walk it in this order: `directory` (files to a configuration, without torch), `weights` (files to tensors),
`decoder` (tensors to layers, and the loop over them). `calibrated` is the model's profile, without torch.
"""
