"""The front door; runs on CPU nodes and never imports torch."""
