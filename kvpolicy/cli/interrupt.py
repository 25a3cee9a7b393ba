"""Ctrl-C, with what the user wants to know about it."""


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    """The user has had enough; the message says what is kept and how to go on."""
