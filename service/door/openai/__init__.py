"""Parts of OpenAI's requests and answers."""
