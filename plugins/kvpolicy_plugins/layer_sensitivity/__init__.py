"""Sensitivity of layers to block prefill: measured by a command, used to divide a budget."""
