"""Reads and checks a model's directory, without torch, because doors read it, too. Start at `store` and
`model_config`."""
