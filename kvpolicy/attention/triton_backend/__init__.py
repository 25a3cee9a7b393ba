"""Attention in Triton, for GPUs; importing these modules needs the extra ``kernels``."""
