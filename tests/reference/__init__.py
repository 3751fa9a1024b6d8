"""Oracles: the definition of each kernel, in plain float64 loops that are never tuned.

Each file is named like the package whose kernels it checks. Only tests and benchmarks import oracles.
"""
