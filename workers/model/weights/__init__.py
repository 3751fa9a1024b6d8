"""Weights, from files to matrices on the device.

`sources.py` opens safetensors or GGUF. `stack_weights.py` reads one stage's share, merges an adapter
(`lora.py`) and fuses matrices (`projections.py`). `gguf_*.py` read GGUF files and convert them once.
"""
