"""A conversion's layers that are quantized on what they see: the runs, a block of experts, its shards.

layers          the two runs through the model, layer by layer
norm_smoothing  AWQ between a norm and all its readers, decided before the layer's experts
expert_block    experts from what their inputs were to integers
layer_shards    where those integers are written, in the plan's order
"""
