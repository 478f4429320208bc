"""Is the pressed checkpoint good enough to serve? Four questions to a real server, and a gate for each answer.

    loads     every tensor of ours is in the server, before boot from the headers and after boot from the data flow
    memory    weights and KV pool on each GPU, against the baseline and against what `plan` predicts
    speed     SGLang's own bench_serving, baseline and candidate in turn
    sanity    greedy tokens and log-probabilities against transformers' layers on the same weights; repeats; loops

A gate ends as a value: ``passed``, ``failed`` (reason, numbers) or ``not judged`` (reason). What could not be measured is
never passed. `run` is the order of events, `gates` the verdicts, one module each for the measurements.

The result, as ``--json`` prints it and ``OUT/.moepress/results/validate.json`` keeps it under ``found``. A *figure* is
``{"value": float, "unit": str}``, and where it was measured more than once also ``"min"``, ``"max"`` and ``"runs": [float]``
(value is the median). Memory is in GiB (2**30 bytes) on one GPU, the fullest. ``null`` = not asked, or not there::

    {
      "schema": 1,
      "verdict": "pass" | "fail" | "not judged",      fail: a gate failed; pass: every gate passed; else not judged
      "output": "OUT", "baseline": "SRC" | null,
      "recipe": "glm-5" | null,                        whose gates were applied
      "asked": ["loads", "memory", "speed", "sanity"],
      "started": "2026-01-31T12:00:00Z", "seconds": 812.4,
      "smoke": true,                                   no GPU: speed and memory figures show that measuring works, no more
      "machine": {"system", "processor", "cores", "memory_gib", "gpus": [{"name", "memory_gib"}], "driver"},
      "environment": {"how": "python" | "container" | "url", "python", "sglang", "cpu_lab": bool,
                      "packages": {"torch": "2.13.0", "transformers": …}},
      "servers": {"candidate": SERVER, "baseline": SERVER | null},
      "loads": LOADS | null, "memory": MEMORY | null, "speed": SPEED | null, "sanity": SANITY | null,
      "kv_integrity": KVINTEGRITY | null,              where --kv-integrity asked for it
      "gates": [{"gate": "loads", "verdict": "passed" | "failed" | "not judged", "reason": "…",
                 "numbers": {"KL": FIGURE, "bound": FIGURE, …}}],
      "remarks": ["…"],                                what a reader should know beside the gates
      "next": "moepress …"                             the command to run now
    }

    SERVER  {"model": "DIR", "url", "command": "… as it can be pasted …" | null, "version": "0.5.23",
             "boot_seconds": [41.0, …], "load_seconds": FIGURE | null, "model_class", "quantization",
             "kv_dtype": "bfloat16" | "float8_e4m3fn" | null (from the log; null where there is none), "logs": [file],
             "flags": {…resolved}}
    LOADS   {"before": {"tensors": 1234, "problems": ["3 × tensor that …: a, b, c"]},
             "after": {"tensors", "used", "parameters", "excused": {"reason": 12}, "problems": [str], "log": [str]} | null,
             "not_proven": "why there is no after" | null,
             "unchanged": true | false | null}         a second boot held the same parameters (weights_checker)
    MEMORY  {"kv_dtype", "tensor_parallel": 8,
             "candidate": SIDE, "baseline": SIDE | null,
             "rows": [{"component": "routed experts", "candidate": FIGURE, "baseline": FIGURE | null,
                       "predicted": FIGURE}],          parameters by component (`formats.families.Component`, and the
                                                       server's own); predicted is plan's for the candidate
             "explained": ["server's own beside the parameters: 0.31 GiB (…)", …]}
    SIDE    {"weights", "parameters", "kv_pool", "free", "kv_tokens", "kv_bytes_per_token": FIGURE | null, "kv_dtype",
             "predicted": {"weights": FIGURE, "kv_tokens": FIGURE | null, "kv_bytes_per_token": FIGURE}}
    SPEED   {"workload": {"prompt_tokens", "output_tokens", "prefill_tokens", "rounds", "order": ["candidate", …]},
             "decode": [{"concurrency": 1, "candidate": RATES, "baseline": RATES | null,
                         "ratio": FIGURE | null, "verdict": "faster" | "slower" | "no difference" | null}],
             "prefill": {"candidate": {"prefill": FIGURE}, "baseline": … | null, "ratio": FIGURE | null, "verdict"},
             "remarks": [str]}
    RATES   {"decode": FIGURE tok/s of all requests, "per_request": FIGURE tok/s, "output": FIGURE tok/s, prefill included,
             "ttft_p50", "ttft_p95", "inter_token_p50", "inter_token_p95": FIGURE ms}
    SANITY  {"prompts": 16, "tokens": 256,
             "agreement": {"equal": 250, "near_ties": 6, "wrong": 0, "near_tie_nats": 0.25,
                           "worst": {"prompt", "position", "gap_nats", "served", "reference"} | null},
             "first_tokens": {"equal": 16, "of": 16}, "positions": 900, "top_mass": 0.97 (of the 64 tokens that KL sums over),
             "kl_serving": FIGURE nats/token              reference on the pressed weights ‖ served
             "kl_source": FIGURE nats/token | null        reference on the baseline's weights ‖ served: pressing and serving
             "kl_pressing": FIGURE nats/token | null      reference on the baseline's weights ‖ on the pressed ones
             "no_reference": "why agreement, first_tokens and kl_… are null" | null,
             "deterministic": true, "differing": [prompt, …],
             "long": {"candidate": {"answers": 8, "tokens", "looping": 0, "distinct": FIGURE}, "baseline": … | null},
             "samples": [{"prompt": "…", "served": "…"}]}
    KVINTEGRITY  {"mode": "enforce", "ranks": [the plug-in's status of each rank], "problems": [str],
             "overhead": [{"concurrency": 8, "throughput": FIGURE ×, "inter_token_p95": FIGURE ×, "ttft_p95": FIGURE ×}],
             "order": ["guarded", "plain", …]}        ratios with over without, round by round
"""
