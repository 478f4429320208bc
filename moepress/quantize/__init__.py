"""Tensors in, tensors out: how a weight becomes integers.

Read in this order: `grid` (codes, groups, scales), `rtn` (rounding to nearest), `hessian` (what the inputs say about
which errors matter), `factor` and `gptq` (rounding that lets later columns make up for earlier ones), `polish` (going
over it again while it helps), `error_aware` and `awq` (what to aim at, and what to move before rounding). `fidelity` and
`decision` are what is reported about a tensor. No file is opened here, and nothing is imported but `moepress.errors`.
"""
