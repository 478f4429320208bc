"""Lines are as SGLang 0.5.23 wrote them (times and paths shortened)."""

from __future__ import annotations

from moepress.serving.server_log import parse_log

CPU_BOOT = """\
[16:10:36] moepress CPU lab: kernels replaced (15 functions). For tests and demonstrations, never for a GPU.
[16:10:40] Init parallel ends. elapsed=0.02 s
[16:10:44] Load weight begin. avail mem=16.01 GB
[16:14:25] Using CompressedTensorsWNA16MarlinMoEMethod
Multi-thread loading shards: 100% Completed | 2/2 [00:00<00:00, 51.12it/s]
[16:10:44] Load weight end. elapsed=0.45 s, type=DeepseekV3ForCausalLM, quant=compressed-tensors, avail mem=15.95 GB, mem usage=0.06 GB.
[16:10:46] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 20000, KV size: 0.02 GB
[16:10:46] Memory pool end. avail mem=15.82 GB
[16:10:46] max_total_num_tokens=20000, chunked_prefill_size=4096, max_prefill_tokens=16384, max_running_requests=2500, context_len=4096, available_cpu_mem=15.82 GB
"""  # noqa: E501
READY = "[16:11:01] The server is fired up and ready to roll!\n"


def test_a_boot_is_read() -> None:
    log = parse_log(CPU_BOOT + READY)
    assert log.ready
    assert log.cpu_lab
    assert (log.model_class, log.quantization) == ("DeepseekV3ForCausalLM", "compressed-tensors")
    assert (log.weights_gib, log.load_seconds) == (0.06, 0.45)
    assert (log.kv_dtype, log.kv_tokens, log.kv_gib, log.free_gib) == ("bfloat16", 20000, 0.02, 15.82)
    assert log.unused_tensors == ()
    assert log.death is None


def test_half_a_boot_is_not_ready_and_guesses_nothing() -> None:
    log = parse_log("\n".join(CPU_BOOT.splitlines()[:4]))
    assert not log.ready
    assert (log.model_class, log.weights_gib, log.kv_dtype, log.kv_tokens) == (None, None, None, None)


def test_an_unquantized_model_has_no_quantization() -> None:
    line = "Load weight end. elapsed=0.45 s, type=Qwen3MoeForCausalLM, avail mem=15.95 GB, mem usage=0.06 GB."
    log = parse_log(line)
    assert (log.model_class, log.quantization, log.weights_gib) == ("Qwen3MoeForCausalLM", None, 0.06)


def test_quantization_with_further_fields() -> None:
    line = "Load weight end. elapsed=9 s, type=Glm4MoeForCausalLM, quant=fp8, fmt=e4m3, mem usage=88.46 GB."
    assert (parse_log(line).quantization, parse_log(line).weights_gib) == ("fp8", 88.46)


def test_of_several_ranks_the_one_that_needs_most_counts() -> None:
    log = parse_log(
        "[x TP0] Load weight end. elapsed=60.1 s, type=Glm4MoeForCausalLM, quant=fp8, mem usage=51.10 GB.\n"
        "[x TP7] Load weight end. elapsed=61.5 s, type=Glm4MoeForCausalLM, quant=fp8, mem usage=51.53 GB.\n"
        "[x TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 700000, K size: 10.5 GB, V size: 10.5 GB\n"
    )
    assert (log.weights_gib, log.load_seconds) == (51.53, 61.5)
    assert (log.kv_dtype, log.kv_tokens, log.kv_gib) == ("float8_e4m3fn", None, 21.0)


def test_tensors_that_a_loader_passes_over_are_named_once() -> None:
    log = parse_log(
        "[16:10:44] model.layers.1.mlp.experts.0.gate_proj.weight_scales not found in params_dict.\n"
        "[16:10:44] model.layers.1.mlp.experts.0.gate_proj.weight_scales not found in params_dict.\n"
        "[16:10:44] Parameter model.layers.0.self_attn.foo not found in params_dict\n"
    )
    assert log.unused_tensors == (
        "model.layers.1.mlp.experts.0.gate_proj.weight_scales",
        "model.layers.0.self_attn.foo",
    )


def test_kv_scales_put_to_one_are_reported() -> None:
    line = (
        "[16:10:44] Ignoring compressed-tensors kv_cache_scheme {'num_bits': 8, 'strategy': 'channel'}: "
        "only static symmetric per-tensor FP8 scales are supported."
    )
    assert parse_log(line).kv_scale_warnings == (line,)
