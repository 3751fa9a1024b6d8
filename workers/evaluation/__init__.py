"""Measures how good answers are after sparse prefill, compared with dense, on a user's own model. Start at
`evaluation.py`.

`prompts.py` and `ruler.py` make prompts, `planner.py` chooses the settings to try and the best one, and
`comparison.py` compares answers with dense attention's. These import no torch. `reader.py` (prefill) and
`answering.py` (decode) run the model.
"""
