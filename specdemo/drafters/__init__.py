"""Drafters propose the tokens that the target checks. `names` lists them."""
