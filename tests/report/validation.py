"""Results in the shapes that `moepress.serving.validation` and `moepress.evaluate` document: input of the page, made by hand."""

from __future__ import annotations

from typing import Any


def figure(value: float, unit: str, spread: float = 0.0) -> dict[str, Any]:
    low, high = value * (1 - spread), value * (1 + spread)
    return {"value": value, "unit": unit, "min": low, "max": high, "runs": [low, value, high]}


def _rates(decode: float) -> dict[str, Any]:
    milliseconds = {name: figure(12.5, "ms") for name in ("ttft_p50", "ttft_p95", "inter_token_p50", "inter_token_p95")}
    return {
        "decode": figure(decode, "tok/s", 0.03),
        "per_request": figure(decode, "tok/s"),
        "output": figure(decode, "tok/s"),
        **milliseconds,
    }


def _side(weights: float, tokens: float) -> dict[str, Any]:
    return {
        "weights": figure(weights, "GiB"),
        "kv_pool": figure(40.0, "GiB"),
        "free": figure(9.0, "GiB"),
        "kv_tokens": figure(tokens, "tokens"),
        "kv_bytes_per_token": figure(53940, "bytes"),
        "predicted": {
            "weights": figure(weights, "GiB"),
            "kv_tokens": None,
            "kv_bytes_per_token": figure(53940, "bytes"),
        },
    }


def validation(*, smoke: bool) -> dict[str, Any]:
    """Faster at one request and slower at 32; every gate but speed passed."""
    decode = [
        {
            "concurrency": concurrency,
            "candidate": _rates(ours),
            "baseline": _rates(theirs),
            "ratio": figure(ours / theirs, "×", 0.02),
            "verdict": "faster" if ours > theirs else "slower",
        }
        for concurrency, ours, theirs in ((1, 123.4, 80.0), (32, 812.0, 909.0))
    ]
    server = {
        "model": "OUT",
        "url": "http://127.0.0.1:1",
        "command": "python -m sglang.launch_server",
        "kv_dtype": "bfloat16",
    }
    return {
        "schema": 1,
        "verdict": "fail",
        "smoke": smoke,
        "servers": {"candidate": server, "baseline": None},
        "loads": {
            "before": {"tensors": 9, "problems": []},
            "after": {"tensors": 9, "used": 8, "parameters": 4, "excused": {"MTP layer": 1}, "problems": [], "log": []},
            "unchanged": True,
        },
        "memory": {
            "kv_dtype": "fp8",
            "tensor_parallel": 8,
            "candidate": _side(51.94, 1_250_000),
            "baseline": _side(88.46, 610_000),
            "rows": [
                {
                    "component": "routed experts",
                    "candidate": figure(45.0, "GiB"),
                    "baseline": None,
                    "predicted": figure(44.9, "GiB"),
                }
            ],
            "explained": ["server's own beside the parameters: 0.31 GiB"],
        },
        "speed": {
            "workload": {},
            "decode": decode,
            "prefill": {
                "candidate": {"prefill": figure(8660.0, "tok/s")},
                "baseline": None,
                "ratio": None,
                "verdict": None,
            },
        },
        "sanity": {
            "prompts": 16,
            "tokens": 256,
            "agreement": {"equal": 250, "near_ties": 6, "wrong": 0, "near_tie_nats": 0.25, "worst": None},
            "first_tokens": {"equal": 16, "of": 16},
            "kl_serving": figure(0.001, "nats/token"),
            "kl_source": None,
            "kl_pressing": None,
            "deterministic": True,
            "differing": [],
            "long": None,
            "samples": [],
        },
        "gates": [
            {"gate": "loads", "verdict": "passed", "reason": "8 of 9 used, 1 excused", "numbers": {}},
            {
                "gate": "speed",
                "verdict": "not judged" if smoke else "failed",
                "reason": "smoke only" if smoke else "slower at 32 requests",
                "numbers": {"at 1": figure(1.54, "×"), "bound": figure(1.5, "×")},
            },
        ],
        "next": "moepress report OUT",
    }


def evaluation() -> dict[str, Any]:
    """One figure accepted, one a regression, drift measured, one task not asked."""
    side = {"server": "SGLang 0.5.23", "url": None, "model": "m", "identity": "0"}
    row = {
        "domain": None,
        "of": "prompts",
        "recovery": None,
        "method": "paired bootstrap over windows",
        "better": "lower",
        "mcnemar": None,
        "truncated": {"source": 0, "candidate": 0},
        "why": "",
    }
    curve = {"pairs": 32, "diverged": 20, "median": 87, "restricted_mean": 130.2, "token_agreement": 0.6}
    curve |= {"positions": [1, 2, 90], "surviving": [1.0, 0.9, 0.4], "low": [0.9, 0.8, 0.3], "high": [1.0, 1.0, 0.5]}
    figures = {"source": None, "candidate": 0.0121, "difference": 0.0121, "interval": [0.0113, 0.0129], "bound": 0.05}
    scores = {"source": 0.94, "candidate": 0.91, "difference": -0.03, "interval": [-0.04, -0.02], "bound": -0.01}
    return {
        "schema": 1,
        "verdict": "REGRESSION",
        "source": {"name": "SRC", **side},
        "candidate": {"name": "OUT", **side},
        "bounds": {"confidence": 0.95},
        "rows": [
            {"task": "fidelity", "metric": "KL, prose", "samples": 24, "verdict": "ACCEPT", **row, **figures},
            {"task": "gsm8k", "metric": "exact_match", "samples": 1319, "verdict": "REGRESSION", **row, **scores},
        ],
        "gates": [{"gate": "gsm8k", "verdict": "failed", "reason": "3 points worse", "numbers": {}}],
        "fidelity": None,
        "drift": {"prompts": 32, "tokens": 256, "candidate": curve, "noise": None, "prompts_sample": []},
        "tool_calls": None,
        "tasks": None,
        "skipped": [{"task": "mmlu", "why": "lm-eval is not installed"}],
        "requests": {"asked": 1, "from_cache": 0},
        "next": "moepress report OUT",
    }


def kv_cache() -> dict[str, Any]:
    """What convert reports of KV scales: one layer folded, one as it was."""

    def layer(scale: float, emission: str) -> dict[str, Any]:
        return {
            "scale": {"latent": scale, "k_pe": 1.0},
            "reason": {"latent": "2 × 900 does not fit 448", "k_pe": "1.0 is as good"},
            "amax": {"latent": 900.0, "k_pe": 20.0},
            "clipped_at_one": {"latent": 0.0123, "k_pe": 0.0},
            "below_normal_at_one": {"latent": 0.0, "k_pe": 0.0},
            "clipped": {"latent": 0.0, "k_pe": 0.0},
            "below_normal": {"latent": 0.0, "k_pe": 0.0},
            "attention_error_at_one": 0.2,
            "attention_error": 0.02,
            "emission": emission,
            "folds": {},
        }

    return {
        "emission": "folded",
        "reason": "the contract of sglang 0.5.23",
        "suspicious": ["k_pe is the same in every layer"],
        "layers": {"0": layer(8.0, "folded"), "1": layer(1.0, "none")},
    }
