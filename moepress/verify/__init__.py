"""Judging a finished output by other people's code: nothing here reads it with moepress's own reader.

files          shards, index, side files, receipts, checksums           json, hashlib, the safetensors library
configuration  config.json says what the files hold                     compressed-tensors
tensors        every tensor against the source                          safetensors, compressed-tensors' unpacker, plain torch
run            all of them, and the verdict
"""
