"""DeltaXAttention: a mask whose lesser tiles are attended over packed keys."""
