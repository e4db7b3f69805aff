"""Triton kernels, installed as ``continuum_ops.kernels``."""
