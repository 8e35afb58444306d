"""Speculative decoding: sampling, the verification rule, the loop, adaptive K, the events it yields."""
