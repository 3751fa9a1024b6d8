"""Loads weight files into matrices on the device. `stack_weights` reads a stage's share from `sources`.
`gguf` converts GGUF files, and `tekken` converts Mistral's tokenizers."""
