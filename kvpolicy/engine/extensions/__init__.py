"""Features of the engine, a file each: what they do at fixed places of a step."""
