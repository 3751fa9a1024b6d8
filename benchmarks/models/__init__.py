"""What docs/models.md says: families, and public models by the numbers of their configurations."""
