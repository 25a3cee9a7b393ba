"""lm-evaluation-harness: its tasks, answered by a model under a plan.

`PolicyLM` in `kvpolicy.lab.lm_eval.model` is a model as the harness wants one; it can be given
to ``lm_eval.simple_evaluate`` by hand. Modules here import the package ``lm_eval``, which the
extra ``kvpolicy[lm-eval]`` installs.
"""
