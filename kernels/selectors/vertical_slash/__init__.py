"""Vertical and slash lines from the last queries (MInference); a whole-prompt baseline."""
