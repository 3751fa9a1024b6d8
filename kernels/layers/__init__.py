"""The operations of a decoder layer other than attention, and sampling.

Each file has one operation: its input check, CPU version and kernel.
"""
