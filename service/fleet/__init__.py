"""The workers as a door knows them. Start at `fleet.py`; `admission.py` decides, `ray_directory.py` finds."""
