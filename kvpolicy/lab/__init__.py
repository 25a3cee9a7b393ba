"""Ablations: tasks, graders, the bundled reasoner, sweeps and their results."""
