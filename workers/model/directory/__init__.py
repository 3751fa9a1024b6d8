"""Reads and checks a model's directory. It imports no torch, because API servers use it, too. Start at
`store` and `model_config`."""
