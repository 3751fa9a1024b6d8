"""DPXA: tiles scored by query anchors against key anchors.

Start at `selector.py`. `form.py` has the settings and the suffixes, `summary.py` fills slots, `scores.py` or
`hopper.py` multiplies them.
"""
