"""A decode worker: receives a prompt's KV into pages and decodes the answer.

Start at `worker` (its Ray actor) and `engine`, which finds a `request` in the `request_table` and plans its
`reads`. `receiver` takes KV from stages. `scheduler` batches requests; `runner` lays them out as `step_rows`
and computes steps with `decode_attention`.
"""
