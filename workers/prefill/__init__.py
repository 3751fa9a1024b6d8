"""Chunked prefill: `group` decides which chunk runs next, and `stage` computes it.

`group` imports from `stage`, never the other way round.
"""
