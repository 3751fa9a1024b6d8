"""A model: its `directory`, `weights`, `decoder` and `calibrated` profile. `directory` and `calibrated` do
not import torch.
"""
