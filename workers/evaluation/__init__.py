"""Measures the answers of prefill methods on a user's own model. Start at `evaluation.py`.

`prompts.py` and `ruler.py` make prompts, `planner.py` orders them and decides, `comparison.py` compares.
These load no torch. `reader.py` and `answering.py` compute.
"""
