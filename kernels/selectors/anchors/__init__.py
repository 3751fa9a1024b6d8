"""DPXA: tiles scored by query anchors against key anchors.

Start at `selector.py`. `form.py` has the settings and the slots; `summary.py` fills slots, `scores.py`
multiplies them (`hopper.py` on Hopper); `cpu.py` does both on a CPU.
"""
