"""Block means of q against block means of k."""
