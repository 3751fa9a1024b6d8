"""Reads weight files into matrices on the device. `stack_weights` reads a stage's share from `sources`.
`gguf_*` read and convert GGUF, and `tekken` a tokenizer of Mistral's."""
