"""Selection rules: which tiles a row keeps, given their scores.

Start at `rule.py`, the definition.
"""
