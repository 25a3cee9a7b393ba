"""A server on several machines: replicas of an engine behind a router, on Ray Serve."""
