"""A model: what its directory says, its weights, and one decoder for the Llama family."""
