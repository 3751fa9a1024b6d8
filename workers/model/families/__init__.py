"""The differences between families of models, as data. Free of torch, because doors read it. Start at
`family`; `workers/model/family_registry.py` finds a model's family."""
