"""Which answers sparse attention keeps: every method against dense attention on the same documents."""
