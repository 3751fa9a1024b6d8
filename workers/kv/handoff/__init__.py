"""The hand-off (KV transfer) from a prefill stage to a decode worker, layer by layer during prefill.

Read in this order: `protocols` (what both sides promise), `stream` (the stage's side), `outbox` (messages),
`inbox` (the decode worker's side), then one transport: `cuda_ipc`, `nixl` or `object_store`.
"""
