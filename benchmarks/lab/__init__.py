"""Compares every prefill method with dense attention on RULER's tasks, for models without our adapters.

Start at `__main__.py`. `fetch.py` gets the models, `samples.py` makes prompts, `reading.py` reads and answers
them, `table.py` compares.
"""
