"""The front end (API server). It runs on CPU nodes and never imports torch."""
