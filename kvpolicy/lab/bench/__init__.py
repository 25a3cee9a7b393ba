"""Speed and memory of the engine, compared with other implementations.

* `workload`, `models`, `roofline`: what is run, on which model, and how fast the machine could be.
* `contenders`: who is measured, and what is compared with whom.
* `rounds`: contenders in turns, their turns in a file, and results over all rounds.
* `operating_points`: the budget and the batch at which a contender is measured.
* `diagnostics`: the engine by itself: kernels checked, operations counted, memory over a long text.
"""
