"""The Python client and the command line."""
