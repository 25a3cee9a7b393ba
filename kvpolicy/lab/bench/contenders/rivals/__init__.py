"""Other engines that are measured beside this one, each with a Python of its own environment."""
