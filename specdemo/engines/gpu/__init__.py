"""The engine for GPUs: captured passes of Triton kernels."""
