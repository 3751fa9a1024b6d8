"""The KV cache: its pages, and the hand-off from a stage to a decode worker."""
