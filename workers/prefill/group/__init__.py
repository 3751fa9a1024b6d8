"""A prefill group's actors and its scheduler, the controller.

Start at `group` (the Ray actors) and `controller`. `request_table` and `schedule` choose the next request,
`chunks` cuts its prompt, `pipeline` sends each chunk to all stages, and `watch` detects a stage that hangs.
"""
