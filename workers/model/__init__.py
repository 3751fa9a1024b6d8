"""A model, from the directory that a user names to layers that compute.

Walk `directory` (files to a configuration), `weights` (files to matrices), `decoder` (layers and their loop).
`calibrated` has the profile. The first and the last are free of torch.
"""
