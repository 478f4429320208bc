"""Text in, statistics out; one decoder layer at a time.

Read in this order: `text` (documents → token ids), `weights` (the seam to a checkpoint), `decoder` and `layer_fill`
(transformers' decoder layer, filled by name), `activations` (what flows between layers), `expert_tap` (the seam to the
experts), `layer_runner` and `streamed_model` (the forward pass), `statistics` (second moments for GPTQ), `mtp`,
`kv_cache`, `divergence` (KL between two models), `memory` (what a run will need, from the configuration alone).

Never import llmcompressor here: importing its model loading changes transformers' own in the whole process.
"""
