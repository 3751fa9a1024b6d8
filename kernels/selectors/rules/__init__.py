"""Selection rules: which tiles to keep, given their scores."""
