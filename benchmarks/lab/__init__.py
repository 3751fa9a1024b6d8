"""A laboratory with models as their makers trained them.

It asks RULER's tasks with the question in the prompt, and puts every prefill method beside dense attention.

Start at `__main__.py`. `fetch.py` gets the models, `samples.py` makes prompts, `reading.py` reads and answers
them, `table.py` compares.
"""
