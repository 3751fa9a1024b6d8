"""Mixture of experts: routing, and the experts' grouped GEMMs."""
