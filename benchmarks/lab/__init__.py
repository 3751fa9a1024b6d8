"""Compares prefill methods with dense attention on RULER's tasks, for any model.

Start at `__main__.py`. `fetch.py` downloads models, `samples.py` and `ruler.py` make prompts,
`workers.evaluation` answers them and compares. `recall.py` measures which blocks would be recomputed,
`delta_forms.py` how well forms of the Δ correction restore dense attention's outputs,
`long_answers.py` how DELTA decodes long answers.
"""
