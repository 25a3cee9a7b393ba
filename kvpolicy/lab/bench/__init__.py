"""Speed and memory of the engine, compared with other implementations."""
