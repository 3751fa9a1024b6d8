"""Generates load for servers of OpenAI's HTTP API and measures their answers."""
