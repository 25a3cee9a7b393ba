"""Decode steps of few kernels: a step is recorded as operators, and groups of them become one."""
