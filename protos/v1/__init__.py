"""Generated from deltafront.proto; see `make proto`."""
