"""Mixtures of experts: routing tokens to experts, and the experts' products."""
