"""The differences between model families, as data. It imports no torch, because API servers use it. Start at
`family`; `workers/model/family_registry.py` finds a model's family."""
