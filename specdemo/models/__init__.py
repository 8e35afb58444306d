"""Presets, and what makes one ready to run: sources, checkpoints, chat templates, error messages."""
