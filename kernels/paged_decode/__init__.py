"""Decode attention over pages, with page scores and page selection."""
