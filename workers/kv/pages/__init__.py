"""Pages of KV and their holders: plain accounting, without tensors."""
