"""The engine: requests, the running batch, decode steps and compactions."""
