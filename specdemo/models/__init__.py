"""Presets, and all that makes one ready to run: sources, checkpoints, chat templates, error messages."""
