"""The anchor scan: runs of similar rows, each led by its anchor."""
