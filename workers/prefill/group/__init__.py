"""The head of a prefill group: which request's chunk runs next, on all stages, and how a request ends.

Walk it from `group` (its Ray actors) to `controller`. That asks `request_table` (who is here, whose pages)
and `schedule` (whose turn), cuts a `request` by `chunks`, and sends each chunk by `pipeline`, under `watch`.
`local_group` runs a whole group in one process.
"""
