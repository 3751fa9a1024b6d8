"""Text and token ids. Start at `tokenizer.py`."""
