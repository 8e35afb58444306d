"""What made the shipped drafters, the pictures and some figures of the docs; specdemo imports none of it."""
