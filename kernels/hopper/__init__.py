"""Parts that every Hopper kernel here is built from.

`layouts.py` has sizes and register layouts, `descriptors.py` how the copy engine (TMA) sees a tensor,
`ring.py` buffers between a copying warp and its readers, `device.py` what the device is.
"""
