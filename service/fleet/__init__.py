"""Workers as the door knows them, and whether they have room."""
