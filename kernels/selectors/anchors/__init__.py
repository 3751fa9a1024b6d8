"""Query anchors against key anchors (our bounded form of DPXA)."""
