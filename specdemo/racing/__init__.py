"""Lanes raced on one clock, and what comes of them: statistics, comparison, traces, text."""
