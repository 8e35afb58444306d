"""What the broken rules of `rules` do wrong, in words. Apart from them, so that the page is built without torch."""

DESCRIPTIONS = {
    "accept-if-p-exceeds-q": "A drafted token passes only if p > q",
    "resample-from-p": "A rejected token is replaced by a draw from p, not from the residual",
    "noise-used-twice": "The noise of a position is used again at the next",
}
