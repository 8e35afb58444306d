"""What a person reads where something cannot be used or done."""

from __future__ import annotations


class BadInput(ValueError):
    """Something a person typed or passed that cannot be used; the message is shown to them as is."""


class NotFinite(ArithmeticError):
    """A model gave logits with NaN or infinity, of which no token can be drawn; the message is a sentence to show."""
