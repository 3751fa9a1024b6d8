"""A decoder layer outside attention, and sampling.

Each file has one operation: its check, CPU form and kernel.
"""
