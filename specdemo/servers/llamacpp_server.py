"""llama.cpp's server in a process of its own: run as a file by a Python that has the package xllamacpp.

It imports nothing of this project. One line of JSON on stdin says what to serve; one on stdout answers with the address
and the version. The server ends when stdin is closed, so it never outlives the process that started it.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version


def main() -> None:
    import xllamacpp as llama

    options = json.loads(sys.stdin.readline())
    params = llama.CommonParams()
    params.model.path = options["gguf"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.n_ctx, params.n_parallel = options["context"], options.get("parallel", 1)
    params.port = 0  # any that is free
    params.endpoint_metrics = True
    types = llama.common_speculative_type
    if options.get("ngram"):
        params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = options["ngram"]
        params.speculative.ngram_simple.size_m = options["k"]
    elif options.get("draft_gguf"):
        params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = options["draft_gguf"]
        params.speculative.draft.n_max = options["k"]
        params.speculative.draft.cpuparams.n_threads = options["threads"]
    server = llama.Server(params)
    served = {"address": server.listening_address, "version": f"xllamacpp {version('xllamacpp')}"}
    print(json.dumps(served), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
