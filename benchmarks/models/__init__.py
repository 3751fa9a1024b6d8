"""Makes the tables of docs/models.md: model families, and public models by their config.json."""
