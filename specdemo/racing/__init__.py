"""Lanes raced on one clock, and what is made of them: statistics, comparison, traces, text."""
