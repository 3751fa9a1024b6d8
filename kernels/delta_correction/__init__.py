"""Corrects any method by the dense attention of every gamma-th row."""
