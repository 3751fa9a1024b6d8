"""The oracles: what each kernel should compute, in plain loops over float64, never tuned.

Tests and benchmarks compare with them, a CPU form directly and a kernel directly or with its CPU form; no
production code imports them.
"""
