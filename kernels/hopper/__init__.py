"""Parts that every Hopper kernel here is built from."""
