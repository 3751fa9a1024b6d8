"""XAttention's selector: it scores tiles by groups of rows. Start at `antidiagonal.py`."""
