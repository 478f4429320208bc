"""Results in the shapes that fidelity, evaluate and validate keep, with figures from published comparisons."""

from __future__ import annotations

from typing import Any


def figure(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit}


FIDELITY: dict[str, Any] = {
    "texts": {
        "held-out prose": {
            "tokens": 8176,
            "kl": 0.0121,
            "kl_standard_error": 0.0004,
            "top1_agreement": 0.953,
            "source_perplexity": 13.9,
            "candidate_perplexity": 14.0,
        }
    },
    "drift": [0.01, 0.02],
    "experts": {},
}


def row(task: str, metric: str, samples: int, source: float | None, candidate: float, verdict: str) -> dict[str, Any]:
    return {
        "task": task,
        "metric": metric,
        "of": "prompts",
        "samples": samples,
        "source": source,
        "candidate": candidate,
        "recovery": None if source is None else candidate / source,
        "difference": candidate if source is None else candidate - source,
        "interval": [-0.0158, -0.0009],
        "method": "Tango score interval",
        "bound": -0.01,
        "better": "higher",
        "mcnemar": None,
        "truncated": {"source": 0, "candidate": 0},
        "verdict": verdict,
        "why": "the interval lies below the bound",
    }


EVALUATE: dict[str, Any] = {
    "schema": 1,
    "verdict": "REGRESSION",
    "bounds": {"confidence": 0.95},
    "rows": [
        row("gsm8k", "exact match", 1319, 0.9439, 0.9356, "REGRESSION"),
        row("mmlu", "accuracy", 14042, 0.8660, 0.8654, "ACCEPT"),
        row("fidelity: prose", "KL", 16, None, 0.0121, "ACCEPT"),
    ],
    "fidelity": {
        "prose": {
            "tokens": 8176,
            "windows": 16,
            "kl": 0.0121,
            "kl_interval": [0.0113, 0.0129],
            "kl_is": "exact",
            "top1_agreement": 0.953,
        }
    },
    "drift": {
        "prompts": 64,
        "tokens": 256,
        "candidate": {"diverged": 40, "median": 87, "restricted_mean": 130.2},
        "noise": {"diverged": 0, "median": None, "restricted_mean": 256},
    },
    "tool_calls": {
        "single": None,
        "parallel": None,
        "multi-turn": {
            "conversations": 20,
            "turns": 80,
            "by_turn": [
                {"turn": 1, "source": 0.95, "candidate": 0.95, "of": 20},
                {"turn": 4, "source": 0.8, "candidate": 0.7, "of": 20},
            ],
        },
    },
    "tasks": {
        "gsm8k": {
            "kind": "lm-eval",
            "metric": "exact match",
            "samples": 1319,
            "version": "lm_eval 0.4.13",
            "settings": {"task": "gsm8k", "fewshot": 5, "limit": None, "chat": True, "max_tokens": 1024},
        },
        "mmlu": {
            "kind": "lm-eval",
            "metric": "accuracy",
            "samples": 14042,
            "version": "lm_eval 0.4.13",
            "settings": {"fewshot": 5},
        },
    },
    "skipped": [{"task": "arc_challenge", "why": "lm-eval is not installed"}],
}

RATES = {"decode": figure(495.7, "tok/s")}

VALIDATE: dict[str, Any] = {
    "schema": 1,
    "verdict": "pass",
    "smoke": False,
    "machine": {"processor": "x", "gpus": [{"name": "NVIDIA H200", "memory_gib": 139.8}], "driver": "580"},
    "environment": {"how": "python", "sglang": "0.5.23"},
    "servers": {"candidate": {"kv_dtype": "float8_e4m3fn"}, "baseline": None},
    "memory": None,
    "speed": {
        "decode": [
            {
                "concurrency": 8,
                "candidate": RATES,
                "baseline": {"decode": figure(394.2, "tok/s")},
                "ratio": figure(1.2575, ""),
                "verdict": "faster",
            }
        ]
    },
    "gates": [{"gate": "loads", "verdict": "passed", "reason": "", "numbers": {}}],
}
