"""The Lab tab."""
