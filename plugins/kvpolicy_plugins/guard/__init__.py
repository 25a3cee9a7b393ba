"""Guard: eviction of blocks that are asked for again, robust against wrong predictions.

H. Chen, Z. Zhang, X. Zhang and others, "Robustifying Learning-Augmented Caching Efficiently without
Compromising 1-Consistency", NeurIPS 2025, arXiv 2507.16242; the authors' code is
OptiSys-ZJU/Cache-Coliseum at 4568bb6.

`eviction` has the algorithm, `bases` what it is built around, `markers` what it is compared with,
`predictors` and `offline` where predictions come from, `simulation` the cost of a trace,
`traces` and `instances` traces from files and by rule, `cli` the command.
"""
