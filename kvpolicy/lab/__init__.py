"""Ablations: tasks, graders, sweeps and their results."""
