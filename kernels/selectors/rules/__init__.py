"""Selection rules: a rule decides from scores which tiles a query block keeps. `rule.py` has the
definition."""
