"""The head of a prefill group: which request's chunk runs next, on all stages, and how a request ends.

Walk it from `group` (its Ray actors) to `controller`. That asks `request_table` and `schedule` whose turn it
is, cuts a `Request` by `chunks`, and sends each chunk by `pipeline`, under `watch`.
"""
