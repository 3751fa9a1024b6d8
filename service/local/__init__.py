"""Ray, Serve and Deltafront on this machine."""
