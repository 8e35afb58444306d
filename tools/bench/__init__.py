"""Measurements that reproduce the figures of the docs."""
