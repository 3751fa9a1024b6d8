"""Building blocks of the Hopper kernels."""
