"""The head of a prefill group: which request's chunk runs next, on all stages, and how a request ends.

Start at `group` (its Ray actors) and `controller`. The controller asks `request_table` and `schedule` for the
next request, cuts it by `chunks`, and sends each chunk by `pipeline`, under `watch`.
"""
