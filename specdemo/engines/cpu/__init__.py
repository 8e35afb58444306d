"""The C library for CPUs: sources, bindings and memory for weights. `engines.native` runs models with it."""
