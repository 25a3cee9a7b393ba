"""Experiments and work of hours: tasks, sweeps and their results, benchmarks, files of prompts.

What is in a row imports what is in the rows above it, and nothing beside it:

* `statistics`: means and shares with intervals, tests of differences. `store`: run folders, what is
  read from them and appended to them. `sandbox`: programs of a model. `shared`: what cells of a
  sweep compute once. `labels`, `looks`: how series are called and coloured.
* `tasks`: examples, and the metrics that measure answers. `models`: the models of a sweep, and what
  identifies one. `figure`: one style for all figures.
* `analysis`: stored samples pooled, tabulated, compared, exported. `steer`: steering vectors.
  `quality`: what plans keep, measured. `prompt_files`: prompts answered once each. `lm_eval`: a
  model of lm-evaluation-harness.
* `plots`: results against budgets, bytes and memory.
* `sweep`: from a sweep file to settings and cells, and what is left of them to run.
* `executors`: where jobs run. `report`: results as a page. `bench`: speed and memory.
* `cli`: the commands.

A sweep is read (`sweep.sweep_file`), built (`sweep.prepare`, `sweep.grid`) and run (`sweep.runner`)
by an executor, which runs jobs (`sweep.jobs`) whose requests a metric makes (`tasks.task`). Every
sample is in the run folder (`store.store`) before it counts. Whatever shows results reads it again
(`store.read`) and pools its cells over seeds (`analysis.pooling`).
"""
