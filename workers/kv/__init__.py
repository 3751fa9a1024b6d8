"""Keys and values: the pages they live in, and their way from a stage to a decode worker."""
