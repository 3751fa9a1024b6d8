"""Every stride-th row of q and k (the ablation of DPXA)."""
