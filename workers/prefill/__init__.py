"""Reads prompts: `group` decides which chunk runs next, `stage` computes it.

A group has one controller and one or more stages. `group` builds on `stage`, never the other way round.
"""
