"""Our kernels beside FlashInfer's, in one process: equality, then times."""
