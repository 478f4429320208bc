"""llm-compressor's `model_free_ptq` on a block-FP8 checkpoint: the same experts, INT4, round to nearest. Run it as a process.

    python benchmarks/peers/model_free_ptq.py SRC OUT --group-size 32

Only FP8 modules are handed to its dequantizer, only routed experts to its quantizer; everything else it writes as BF16.
"""

from __future__ import annotations

import argparse
import os

FP8_MODULES = [
    r"re:.*\.(gate_proj|up_proj|down_proj)$",
    r"re:.*self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)$",
]
EXPERTS = r"re:.*\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()

    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from llmcompressor import model_free_ptq

    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=arguments.group_size
    )
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=[EXPERTS], weights=weights)},
        ignore=["lm_head"],
        format="pack-quantized",
    )
    model_free_ptq(
        arguments.source,
        arguments.out,
        config=config,
        max_workers=arguments.workers,
        device="cpu",
        converter=FP8BlockDequantizer(targets=FP8_MODULES, weight_block_size=(128, 128)),
    )


if __name__ == "__main__":
    main()
