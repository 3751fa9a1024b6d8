"""DPXA (DeltaAttention, section 4.3) scores a tile by the attention of its query anchors to its key anchors.

A block's rows form runs of similar rows. A run's first row is its anchor and fills one slot of the block.
Start at `selector.py`. `form.py` has the settings and the suffixes, `summary.py` fills the anchor slots,
`scores.py` and `hopper.py` score tiles.
"""
