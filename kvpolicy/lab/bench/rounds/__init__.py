"""Contenders in turns, round by round, and what the rounds show."""
