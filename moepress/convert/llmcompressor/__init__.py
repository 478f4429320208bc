"""``engine: llmcompressor``: the experts' integers from llm-compressor's `oneshot`, in a process of its own.

engine   our side: what it needs, the request, and its integers into planned shards
process  the other side: the only file that imports llm-compressor
"""
