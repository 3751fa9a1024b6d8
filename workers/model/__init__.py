"""A model: its `directory`, `weights`, `decoder` and `calibrated` profile. `directory` and `calibrated` are
free of torch."""
