"""A laboratory with models as their makers trained them: RULER with the question in the prompt, answers decoded
greedily, every prefill method beside dense attention on the same prompts.

Start at `__main__.py`. `fetch.py` gets the models, `samples.py` makes prompts, `reading.py` reads and answers
them, `table.py` compares.
"""
