"""The head of a prefill group: chooses the request whose chunk all stages run next, and ends requests.

Start at `group` (its Ray actors) and `controller`. The controller asks `request_table` and `schedule` for the
next request, cuts it by `chunks`, and sends each chunk by `pipeline`, under `watch`.
"""
