"""`deltafront evaluate`: `command.py`, and `plot.py` for --plot."""
