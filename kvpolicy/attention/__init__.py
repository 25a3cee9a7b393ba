"""How attention is computed: rows are stored, attended to, and moved; and tokens are drawn.

`base` has the interface of a backend, `choose` says which one attends, and each backend has a
folder. Modules whose names contain ``triton_`` are for GPUs and need the extra ``kernels``, those
with ``numba_`` are for CPUs and need the extra ``cpu``; importing this package imports none of
them. Tokens are drawn with torch's operations on every device: what Triton would compute rounds
``exp`` in another way, and a seed would mean other tokens there.
"""
