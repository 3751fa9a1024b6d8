"""Selection rules: given its scores, a rule decides which tiles a query block keeps.

Start at `rule.py`, the definition.
"""
