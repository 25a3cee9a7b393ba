"""Prefixes and conversations that are not computed twice: a store of what sequences have held."""
