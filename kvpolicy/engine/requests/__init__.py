"""Requests from submission to result: what is asked for, its sequence, its tokens and text."""
