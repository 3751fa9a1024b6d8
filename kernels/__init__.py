"""Attention and layer kernels, in torch and Triton.

Tensors have the suffixes of `interface.py` and those that a module names. Start at `methods.py` (names and
options), then `build.py` (selector, backend, correction), then the subpackages. Import nothing in this file,
because transformers probes for a package named `kernels`.
"""
