"""Engines: a model and its key-value cache, behind one protocol (`runner.Runner`).

eager    transformers' own forward
fused    torch's operations on rearranged weights (`layout`, stored as `linear` chooses)
native   on a CPU, one C call for each pass (the library is in `cpu`)
gpu      on a GPU, captured passes (`gpu.graph`), of Triton's kernels (`gpu.kernels`) or torch's operations (`ops`)
choose   picks one of them for a model
"""
