"""The Replay tab."""
