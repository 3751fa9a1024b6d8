"""Who holds which pages of K/V: plain accounting, without tensors."""
