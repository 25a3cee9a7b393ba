"""Attention in Triton, for GPUs; importing what computes needs the extra ``kernels``."""
