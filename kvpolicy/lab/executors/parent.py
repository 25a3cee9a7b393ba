"""A worker process that ends with the process that began it, however that ends."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process, which one of Python's `multiprocessing` has begun, when that is gone.

    Also in the middle of its work, and where the other is killed.
    """
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was begun by one of Python's"
    parent.join()
    os._exit(1)  # `sys.exit` would end this thread only
