"""Common code of the protocols: a call over HTTP, chats over gRPC, errors, tools, and an answer's parts."""
