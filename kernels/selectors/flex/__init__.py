"""Query-aware or vertical-slash by head (FlexPrefill); a whole-prompt baseline."""
