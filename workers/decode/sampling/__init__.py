"""Options of sampling, and log-probabilities that requests ask for."""
