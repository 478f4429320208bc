"""FP8 KV cache on SGLang's torch_native attention: quantize on write, dequantize on read, with the server's own scales.

SGLang's pool stores e4m3 and divides by the scale it is given; its torch_native backend knows neither. For standard
attention the layer's k_scale and v_scale are used on both sides. For MLA the pool ignores scales when it writes and so
do we when we read (flashmla would multiply by k_scale here: any scale but 1.0 is wrong on it).
"""

from __future__ import annotations

import torch


class _Rows:
    """A buffer of the pool whose rows are dequantized as they are taken; the backend does nothing else with it."""

    def __init__(self, buffer, scale, dtype):
        self._buffer, self._scale, self._dtype = buffer, scale, dtype

    def __getitem__(self, tokens):
        return (self._buffer[tokens].float() * self._scale).to(self._dtype)


class _ScaledPool:
    """The pool as one attention layer sees it: bfloat16 outside, e4m3 inside."""

    def __init__(self, pool, layer, dtype):
        self._pool, self._dtype = pool, dtype
        self._is_mla = not hasattr(pool, "v_buffer")
        self._k = 1.0 if self._is_mla else float(getattr(layer, "k_scale_float", None) or 1.0)
        self._v = 1.0 if self._is_mla else float(getattr(layer, "v_scale_float", None) or 1.0)

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def set_kv_buffer(self, layer, loc, k, v):
        if self._is_mla:
            self._pool.set_kv_buffer(layer, loc, k, v)
        else:  # the pool divides in place
            self._pool.set_kv_buffer(layer, loc, k.clone(), v.clone(), self._k, self._v)

    def get_key_buffer(self, layer_id):
        return _Rows(self._pool.get_key_buffer(layer_id), self._k, self._dtype)

    def get_value_buffer(self, layer_id):
        return _Rows(self._pool.get_value_buffer(layer_id), self._v, self._dtype)


def _with_scales(original):
    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        pool = self.token_to_kv_pool
        if pool.dtype != torch.float8_e4m3fn:
            return original(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self.token_to_kv_pool = _ScaledPool(pool, layer, q.dtype)
        try:
            return original(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        finally:
            self.token_to_kv_pool = pool

    return forward


class _NotCpu:
    """The platform, for the one module that refuses an FP8 pool on a CPU without AMX."""

    def __init__(self, platform):
        self._platform = platform

    def __getattr__(self, name):
        return getattr(self._platform, name)

    def is_cpu(self):
        return False


def replacements():
    return {}


def prepare():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import kv_cache_configurator

    kv_cache_configurator.current_platform = _NotCpu(kv_cache_configurator.current_platform)
    TorchNativeAttnBackend.forward_extend = _with_scales(TorchNativeAttnBackend.forward_extend)
    TorchNativeAttnBackend.forward_decode = _with_scales(TorchNativeAttnBackend.forward_decode)
