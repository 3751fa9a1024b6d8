"""Compares prefill methods with dense attention on RULER's tasks, for any model.

Start at `__main__.py`. `fetch.py` downloads models, `samples.py` makes prompts, `reading.py` prefills and
answers them, `table.py` compares the answers.
"""
