"""Tensors in, tensors out: how a weight becomes integers.

Read in this order: `grid` (codes, groups, scales), `rtn` (rounding to nearest), `hessian` (what the inputs say about
    which
errors matter), `gptq` (rounding that lets later columns make up for earlier ones), `awq` (moving difficulty between
weights before rounding). `fidelity` and `decision` are what is reported about a tensor. No file is opened here, and
nothing is imported but `moepress.errors`.
"""
