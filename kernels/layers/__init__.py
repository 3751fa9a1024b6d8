"""A decoder layer outside attention, and sampling.

Each file has one operation with its check, CPU form and kernel. Products of many rows on Hopper go through
`linear_hopper_launch.py`.
"""
