"""Ablations: tasks, graders, the bundled reasoners, sweeps and their results."""
