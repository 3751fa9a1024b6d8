"""Attention kernels (torch and triton only).

Keep this file free of imports: transformers probes for a package of this name.
"""
