"""moepress: press a block-FP8 mixture-of-experts checkpoint into INT4 experts, and prove that it serves."""

__version__ = "0.1.0"
