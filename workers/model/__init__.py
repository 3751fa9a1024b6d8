"""Models: `directory` reads configurations and tokenizers, `weights` loads tensors, `decoder` runs layers,
and `calibrated` reads profiles. `directory` and `calibrated` import no torch."""
