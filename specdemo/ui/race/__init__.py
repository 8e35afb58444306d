"""The Race tab."""
