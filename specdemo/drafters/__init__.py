"""Drafters: what proposes the tokens that the target checks. `names` lists them."""
