"""Selectors choose the tiles of the attention matrix that a backend computes.

Start at `scored.py`: it computes scores, then applies a rule (`rules/`). The scores come from `anchors/` and
`grouped/`. `streaming.py` needs no scores.
"""
