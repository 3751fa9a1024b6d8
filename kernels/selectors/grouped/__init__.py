"""XAttention's selector: it scores groups of query rows and key rows. Start at `antidiagonal.py`."""
