"""XAttention's selector, which scores groups of query rows against groups of key rows. Start at
`antidiagonal.py`."""
