"""FP8 KV cache on torch_native (placeholder while booting the rest)."""


def replacements():
    return {}


def prepare():
    pass
