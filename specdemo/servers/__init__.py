"""Lanes of servers that run elsewhere: vLLM, llama.cpp's server, SGLang.

`address` says which servers may be asked, `client` asks them and bounds what they answer, `dialects` knows what each of
them calls things, `steps` turns their answers into the events of a lane, and `race` runs them.
"""
