"""From weight files to matrices on the device.

`stack_weights.py` reads a stage's share from `sources.py` and fuses it into `projections.py`. `gguf_*.py`
read and convert GGUF.
"""
