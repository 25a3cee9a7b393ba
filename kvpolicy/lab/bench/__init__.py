"""Speed and memory of the engine, compared with other implementations.

* `workload`, `models`, `roofline`, `profile`: what is run, on which model, how fast the machine
  could be, and what a device does in a step.
* `contenders`: who is measured, and what is compared with whom.
* `rounds`: contenders in turns, within a time; their turns in a file, and results over all rounds.
* `operating_points`: the budget and the batch at which a contender is measured.
* `diagnostics`: the engine by itself: kernels checked, operations counted, memory over a long text.
"""
