"""A decode worker: receives a prompt's KV into its pages and decodes the answer.

Start at `worker` (the Ray actor) and `engine`. `request_table` holds each `request`, `receiver` takes its KV
from prefill stages, and `reads` plans what the worker prefills itself. `scheduler` batches requests. `runner`
lays a batch out as `step_rows` and runs decode steps with `decode_attention`.
"""
