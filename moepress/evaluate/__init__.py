"""What did pressing cost? Source and pressed model asked the same things, answers compared prompt by prompt.

    fidelity         layer by layer from the files, no server: `fidelity`, a command of its own
    next tokens      KL, agreement of the most likely token and perplexity over a server, per domain of text
    drift            greedy generations side by side: where they part, and how many are still together
    tasks            lm-eval as a process (GSM8K, MMLU, ARC-Challenge, perplexity); code that is executed in a sandbox;
                     word problems
    tool calls       single, parallel and over several turns, where an early error spoils what follows; with tools that run

Only URLs come in here: `commands.evaluate` boots servers, one after the other, because two models rarely fit on one
machine. Hence every measurement is two halves: *ask* one server (answers are kept per prompt, so a stopped run resumes)
and *compare* two sets of answers (no server needed).

The result, as ``--json`` prints it and ``OUT/.moepress/results/evaluate.json`` keeps it under ``found``. ``null`` = not there.
Shares are 0 to 1, KL in nats a token, ``interval`` is two-sided at ``bounds.confidence``::

    {
      "schema": 1,
      "verdict": "ACCEPT" | "REGRESSION" | "NOT ENOUGH DATA",      the worst row's; REGRESSION also for truncation
      "source":    SIDE, "candidate": SIDE,
      "bounds": {the recipe's `evaluation` section, as applied},
      "rows": [ROW, …],                                            one a judged figure, in the order they are printed
      "gates": [{"gate": "fidelity", "verdict": "passed" | "failed" | "not judged", "reason": "…",
                 "numbers": {"KL, prose": FIGURE}}],               the rows by task, as the report shows every command's gates
      "fidelity": {"prose": DOMAIN, "code": …, "chat": …, "tool calls": …} | null,
      "drift": DRIFT | null,
      "tool_calls": {"single": CALLS, "parallel": CALLS, "multi-turn": TURNS, "stateful": TURNS} | null,   those that were asked
      "tasks": {"gsm8k": TASK, …} | null,
      "skipped": [{"task": "mmlu", "why": "lm-eval is not installed"}],
      "requests": {"asked": 120, "from_cache": 300},
      "next": "moepress …"
    }

    SIDE    {"name": "DIR or id", "server": "SGLang 0.5.23" | "OpenAI-compatible", "url" | null (all answers were kept ones),
             "model": "served name", "identity": "sha256 that the kept answers stand under"}
    FIGURE  {"value": 0.0121, "unit": "nats/token"}
    ROW     {"task": "gsm8k", "metric": "exact_match",             fidelity: "KL, prose"; "perplexity, prose"; …
             "domain": "prose" | null, "of": "prompts" | "windows" | "documents" | "cases", "samples": 1319,
             "source": 0.9439 | null, "candidate": 0.9356,         null: the figure compares the two (KL); drift: the noise
             "recovery": 0.9912 | null,                            candidate / source, for scores
             "difference": -0.0083,                                 candidate − source, or the figure itself
             "interval": [-0.0158, -0.0009], "method": "Tango score interval" | "paired bootstrap over windows",
             "bound": -0.01, "better": "higher" | "lower",         the side of the bound where it is good
             "mcnemar": {"only_source": 20, "only_candidate": 9, "p": 0.061} | null,
             "truncated": {"source": 2, "candidate": 3},
             "verdict": as above, "why": "one sentence"}
    DOMAIN  {"tokens": 8176, "windows": 16,
             "kl": 0.0121, "kl_interval": [0.0113, 0.0129], "kl_is": "exact" | "lower bound",
             "top_k": 64, "unseen_mass": 0.004 | 0.0,              source probability outside the tokens both sides named
             "top1_agreement": 0.953, "top1_interval": [0.948, 0.957],
             "source_perplexity": 13.9, "candidate_perplexity": 14.0,
             "perplexity_rise": 0.007, "perplexity_rise_interval": [0.005, 0.009]}
    DRIFT   {"prompts": 64, "tokens": 256,
             "candidate": CURVE, "noise": CURVE | null,            noise: the source against itself, asked again
             "prompts_sample": [{"prompt", "position", "source", "candidate"}]}
    CURVE   {"pairs": 64, "diverged": 40, "median": 87 | null (more than half never parted), "restricted_mean": 130.2,
             "positions": [1, 2, 4, …], "surviving": [1.0, 0.98, …], "low": [...], "high": [...],   Kaplan–Meier
             "token_agreement": 0.61}                              same token at the same position, all positions
    CALLS   {"cases": 60, "source": {"called": 0.99, "json": 0.98, "schema": 0.97, "names": 0.95, "correct": 0.9},
             "candidate": {…the same…}}                            shares of turns; a step needs those before it
    TURNS   {…as CALLS…, "conversations": 20, "turns": 80, "by_turn": [{"turn": 1, "source": 0.95, "candidate": 0.95, "of": 20}, …],
             "survival": {"source": CURVE-like {"positions", "surviving"}, "candidate": …}}   no error up to this turn
    TASK    {"kind": "lm-eval" | "code" | "word problems", "metric": "exact_match,strict-match", "samples": 1319, "source": 0.94,
             "candidate": 0.93, "version": "lm_eval 0.4.13" | null, "settings": {…},
             "outcomes": {"source": {"passed": 120, "timeout": 1, …}, "candidate": …} | null}
"""
