"""The hand-off of a prompt's K/V from a prefill stage to a decode worker, while prefill goes on.

Read in this order: `protocols` (what both sides promise), `stream` (the stage's side), `outbox` (messages),
`inbox` (the decode worker's side), then one transport: `cuda_ipc`, `nixl` or `object_store`.
"""
