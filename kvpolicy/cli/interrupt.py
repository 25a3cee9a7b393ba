"""Ctrl-C, with what the user wants to know about it."""

import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.05


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    """The user has had enough; the message says what is kept and how to go on."""


@contextmanager
def interrupts_are_heard() -> Iterator[None]:
    """Raise an interrupt again that Python has printed and forgotten.

    It does so with whatever is raised in a finaliser or in a callback of the garbage collector,
    of which Hypothesis has one.
    """
    before = sys.unraisablehook

    def ask_again(forgotten: "sys.UnraisableHookArgs") -> None:
        if forgotten.exc_type is not KeyboardInterrupt:
            before(forgotten)
            return
        # Not from here, where it would be forgotten as well.
        timer = threading.Timer(_AGAIN_S, interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = ask_again
    try:
        yield
    finally:
        sys.unraisablehook = before
