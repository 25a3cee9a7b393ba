r"""The process in which answers are compared: one JSON line in, one out.

In: ``["box", "answer"]``. Out: ``true``, ``false``, or a text that says why neither. The first
line out is ``"ready"``.
"""

import json
import logging
import os
import sys


def main() -> None:
    """Compare until the other side closes its end."""
    # What libraries print must not get among the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    def say(what: object) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    def compare(box: str, answer: str) -> bool | str:
        # Both in a box: the parser then takes them whole, as mathematics and not as prose.
        gold, mine = (parse(f"\\boxed{{{text}}}", raise_on_error=True) for text in (answer, box))
        if not gold:
            return "the right answer is not mathematics"
        return bool(verify(gold, mine, raise_on_error=True))

    say("ready")
    for line in sys.stdin:
        box, answer = json.loads(line)
        try:
            say(compare(box, answer))
        except TimeoutException:
            say("no verdict within the time of a comparison")
        except Exception as error:  # whatever sympy raises on what a model wrote
            say(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")


if __name__ == "__main__":
    main()
