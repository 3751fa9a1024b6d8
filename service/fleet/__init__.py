"""A door's view of the workers. Start at `fleet.py`; `admission.py` chooses workers, `ray_directory.py`
finds them.
"""
