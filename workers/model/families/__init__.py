"""The differences between model families, as data, without torch, because doors read it. Start at `family`;
`workers/model/family_registry.py` finds a model's family."""
