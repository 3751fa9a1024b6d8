"""From weight files to matrices on the device. `stack_weights` reads a stage's share from `sources`; `gguf_*`
read and convert GGUF, `tekken` a tokenizer of Mistral's."""
