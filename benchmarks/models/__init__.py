"""Makes the tables of docs/models.md: model families, and public models by the numbers in their
config.json."""
