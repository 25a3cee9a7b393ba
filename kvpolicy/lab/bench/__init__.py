"""Speed and memory of the engine beside other implementations."""
