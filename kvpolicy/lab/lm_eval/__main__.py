"""The harness's own command line, with the model ``kvpolicy``: ``python -m kvpolicy.lab.lm_eval``.

The harness has no entry points for models, so that its command ``lm_eval`` knows only its own.
"""

from lm_eval.__main__ import cli_evaluate

import kvpolicy.lab.lm_eval.model  # noqa: F401 - registers the model

if __name__ == "__main__":
    cli_evaluate()
