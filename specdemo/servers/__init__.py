"""Lanes of servers that run elsewhere: vLLM, llama.cpp's server, SGLang.

`address` says which servers may be asked, `client` asks them and limits their answers, `dialects` recognises the
kinds of servers, `steps` turns their answers into the events of a lane, and `race` runs the lanes.
"""
