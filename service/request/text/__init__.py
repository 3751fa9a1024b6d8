"""Text and token ids: tokenizer, control tokens, detokenizer, and how much text a door holds."""
