"""Mixture of experts: routing, and grouped GEMMs of the experts."""
