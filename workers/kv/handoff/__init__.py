"""The hand-off (KV transfer) from a prefill stage to a decode worker, layer by layer during prefill.

Read in this order: `protocols` (the interfaces), `stream` (the stage's end), `outbox` (its messages), `inbox`
(the decode worker's end), then one transport: `cuda_ipc`, `nixl` or `object_store`.
"""
