"""From a source checkpoint and a recipe to a finished, checked output folder.

decide      what becomes of every weight, and why             (names and headers only)
layout      which output tensors, in which shard, in what order (names and headers only)
plan        the two above, the resume key, and every reason to refuse
forecast/   disk, memory per GPU, KV tokens, time
press/      one weight: read, decode, quantize, pack           (tensors)
units       one output shard: press its weights, write, receipt
calibrated/ a layer's experts on what they see; its shards
kv/         KV scales: measured, decided, folded or written
llmcompressor/  the experts by that library instead
executor    where the work is done: this process, or workers
journal     what is finished, and whose run this is
run         plan minus receipts, in parallel, then finish
finish      index, config, side files; the output becomes a checkpoint
"""
