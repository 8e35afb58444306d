"""What the Lab page and `python -m specdemo lab` measure."""
