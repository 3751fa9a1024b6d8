"""Reads prompts: `group` decides which chunk runs next, `stage` computes it. `group` builds on `stage`, never
the other way round."""
