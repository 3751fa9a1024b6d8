"""A model: its `directory`, its `weights`, its `decoder` and its `calibrated` profile. The first and the last
are free of torch."""
