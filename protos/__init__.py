"""The deltafront.v1 contract."""
