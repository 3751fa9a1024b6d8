"""DPXA: scores a tile by its query anchors against its key anchors.

Start at `selector.py`. `form.py` has the settings and the suffixes, `summary.py` fills the slots of anchors,
`scores.py` or `hopper.py` multiplies them.
"""
