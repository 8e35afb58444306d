"""What the broken rules of `rules` do wrong, in words. Apart from them, so that the page is built without torch."""

DESCRIPTIONS = {
    "accept-if-p-exceeds-q": "A drafted token passes only if p > q",
    "resample-from-p": "A rejected token is replaced by a draw from p, not from the residual",
    "likeliest-by-ratio": "The drafter's likeliest token is tested as if it had been drawn from q",
    "noise-used-twice": "The noise of a position is used again at the next",
}
