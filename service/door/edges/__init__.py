"""What the HTTP edges share: a call over HTTP, statuses, tools, and an answer's parts."""
