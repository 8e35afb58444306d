"""Watching along: others see the races of a page on their own screens, read only."""
