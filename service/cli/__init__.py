"""The command line, `deltafront`: `main.py` has its commands."""
