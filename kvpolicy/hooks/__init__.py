"""How policies are found, stacked, asked and checked."""
