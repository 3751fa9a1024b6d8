"""Pages of K/V and their holders: plain accounting, without tensors."""
