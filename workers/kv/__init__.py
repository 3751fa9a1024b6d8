"""The KV cache: its pages, its offloading, and its hand-off from prefill stages to decode workers."""
