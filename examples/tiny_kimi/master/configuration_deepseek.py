"""Configuration of the tiny Kimi-K2-style checkpoint, loaded with trust_remote_code.

transformers knows the architecture as `deepseek_v3` but does not know the model type `kimi_k2`, under which such
checkpoints are published. This class closes the gap: DeepSeek V3's configuration under the published name, with the
fields that only servers read kept as they are.
"""

from transformers.models.deepseek_v3 import configuration_deepseek_v3


class DeepseekV3Config(configuration_deepseek_v3.DeepseekV3Config):
    """DeepSeek V3's configuration with model type `kimi_k2`."""

    model_type = "kimi_k2"


__all__ = ["DeepseekV3Config"]
