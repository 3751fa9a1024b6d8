"""The tables of docs/models.md: families, and public models by their configurations' numbers."""
