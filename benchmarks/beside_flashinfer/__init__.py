"""Compares our kernels with FlashInfer's in one process: first outputs, then times."""
