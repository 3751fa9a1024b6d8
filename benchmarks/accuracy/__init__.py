"""Compares the answers of every prefill method with dense attention's on the same documents."""
