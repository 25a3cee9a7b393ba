"""Runs another engine, in an environment of its own: `rivals.rival` starts this file.

It imports nothing of kvpolicy. Its argument is the file of one engine, whose ``start(arguments)``
returns what decodes. Every line on its standard input is a JSON object: the first has the
arguments, every other one ``prompts``, a number of ``new_tokens`` and the ``form`` of the weights.
It answers each with one line: what ``decode`` returns, ``{}`` for the first, or ``{"error"}`` at
its end.
"""

import json
import os
import runpy
import sys
from typing import Any


def main() -> int:
    """Serve until the standard input ends."""
    # Engines and their libraries print to the standard output: answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        decode = runpy.run_path(sys.argv[1])["start"](json.loads(sys.stdin.readline()))
        answer()
        for line in sys.stdin:
            answer(**decode(**json.loads(line)))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
