"""Attention over the tiles of a mask."""
