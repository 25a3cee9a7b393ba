"""Compactions: what policies are shown and asked, and which rows leave."""
