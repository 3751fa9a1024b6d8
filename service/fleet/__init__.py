"""The workers as a door knows them."""
