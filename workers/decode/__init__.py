"""A decode worker: receives a prompt's K/V into pages and makes the answer's tokens from them.

Start at `worker` (its Ray actor) and `engine`, which finds a `request` in the `request_table` and plans its
`reads`. `scheduler` batches requests; `runner` lays them out as `step_rows` and computes steps with
`decode_attention`.
"""
