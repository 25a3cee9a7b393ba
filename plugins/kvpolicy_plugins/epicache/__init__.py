"""EpiCache: conversations in a fixed budget, in one cache for each of their topics."""
