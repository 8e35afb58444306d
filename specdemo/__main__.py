"""`python -m specdemo`."""

from .imports import without_garbage_collection

with without_garbage_collection():
    from .cli import main

if __name__ == "__main__":
    main()
