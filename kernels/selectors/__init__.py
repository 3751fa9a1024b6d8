"""Selectors: which tiles of the score matrix an executor computes.

Start at `scored.py`: scores, then a rule (`rules/`). `anchors/` and `grouped/` compute scores;
`streaming.py` needs none.
"""
