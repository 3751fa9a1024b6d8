"""What stands between a decoder layer's matrix products, 8-bit rows included, and the sampling after them."""
