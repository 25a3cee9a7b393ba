"""``python -m kvpolicy`` is ``kvpolicy``."""

from kvpolicy.cli import main

main()
