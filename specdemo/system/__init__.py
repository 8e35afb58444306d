"""The machine: hardware, folders, compiling C, progress. It knows nothing of decoding."""
