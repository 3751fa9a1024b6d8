"""Which tiles matter: selectors and selection rules."""
