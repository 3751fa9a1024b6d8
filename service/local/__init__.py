"""A service on this machine: Ray, Serve and Deltafront, started, watched and cleaned up after."""
