"""Oracles: what each kernel should compute, in plain loops over float64, never tuned.

Each file is named like the room it checks; `structured.py` makes inputs that look like a model's. Tests and
benchmarks import them, production code never.
"""
