"""Selection rules decide from scores which tiles a query block keeps. `rule.py` defines them."""
