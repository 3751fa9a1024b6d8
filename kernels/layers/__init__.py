"""A decoder layer between its matrix products: norms, rotation and K/V write, activation, 8-bit rows."""
