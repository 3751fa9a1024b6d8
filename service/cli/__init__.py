"""The commands of `deltafront`. Start at `main.py`."""
