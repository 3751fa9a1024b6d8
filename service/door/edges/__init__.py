"""Common code of the HTTP protocols: a call over HTTP, error statuses, tools, and an answer's parts."""
