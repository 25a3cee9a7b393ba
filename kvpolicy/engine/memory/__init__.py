"""Rows and bytes of a plan: allocated, saved, and suggested for a memory."""
