"""Programs that run the same model, each in a child process of its own."""
