"""What a visitor takes away from a race."""
