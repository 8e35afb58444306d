"""The engine for GPUs: captured passes, and the Triton kernels that they are made of."""
