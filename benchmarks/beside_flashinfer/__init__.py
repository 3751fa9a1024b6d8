"""Compares our kernels with FlashInfer's in one process: outputs first, then times."""
