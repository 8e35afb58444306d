"""Recordings and traces: what plays them in the place of a race."""
