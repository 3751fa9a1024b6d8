"""Ray, Serve and Deltafront on this machine. Start at `local_ray.py`."""
