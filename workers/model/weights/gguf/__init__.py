"""Converts llama.cpp's GGUF files. `source` reads a file under our names, `linear` what it stores of linear
attention, and `tokenizer` its vocabulary; `convert` writes a model directory."""
