"""How tiles are computed."""
