"""Oracles: what each kernel should compute, in plain loops over float64, never tuned.

Each file is named like the room it checks. Tests and benchmarks import them, and nothing that serves does.
"""
