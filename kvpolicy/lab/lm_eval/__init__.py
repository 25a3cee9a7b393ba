"""lm-evaluation-harness: its tasks, answered by a model under a plan.

`PolicyLM` in `kvpolicy.lab.lm_eval.model` is a model of the harness; its own command line builds
one as the model ``kvpolicy``. The modules here import the package ``lm_eval``, which the extra
``kvpolicy[lm-eval]`` installs.
"""
