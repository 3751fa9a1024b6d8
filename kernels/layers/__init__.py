"""A decoder layer's matrix products, what stands between them, 8-bit rows included, and sampling."""
