"""Bytes and names: what a checkpoint is.

Read in this order: `dtypes` (how many bytes), `header` (what one shard says it holds), `checkpoint` (whether the
folder as a whole is complete and says one thing), `reader` and `writer` (tensor bytes in and out). Above them,
`storage` says which tensors form one weight, and `families` what that weight does in the model. No module here knows
a quantization algorithm, and none above `reader` touches tensor data, so looking at a 700 GB checkpoint costs its
headers.
"""
