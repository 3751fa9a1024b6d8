"""A model: `directory` (files to a configuration), `weights` (files to matrices), `decoder` (layers and their
loop), and its `calibrated` profile. `directory` and `calibrated` are free of torch."""
