"""Score prompts with vLLM, one checkpoint after the other. Runs in the vLLM environment, not in ours.

    python vllm_scores.py jobs.json       jobs: [{"model": folder, "prompts": [[1, 2, 3]], "log": file}]

Importing vLLM takes longer than running a tiny model, so it is imported once and each job is a fork. Prints one JSON line a
job: {"model", "error", "model_class", "logprobs": [prompt][position] -> log-probability of the next token of the prompt,
"greedy": [prompt] -> tokens that were generated}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def score(job: dict) -> dict:
    """Load one checkpoint in this process, which is good for nothing else afterwards."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        # Plain torch for every operator that has such a form: those compiled for CPUs round elsewhere.
        compilation_config={"custom_ops": ["none"]},
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling)
    return {
        "model_class": model.apply_model(lambda module: type(module).__name__)[0],
        "logprobs": [
            [found[token].logprob for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
            for prompt, output in zip(job["prompts"], outputs, strict=True)
        ],
        "greedy": [list(output.outputs[0].token_ids) for output in outputs],
    }


def main() -> None:
    import vllm.v1.engine.llm_engine  # noqa: F401 - the slow part, shared by all forks

    for job in json.loads(Path(sys.argv[1]).read_text()):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                result = {"error": None} | score(job)
            except BaseException as error:  # noqa: BLE001 - reported, whatever it is
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writer, "w") as out:
                json.dump(result, out)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        result = json.loads(text) if text else {"error": "the process ended without an answer"}
        print(json.dumps({"model": job["model"], **result}), flush=True)


if __name__ == "__main__":
    main()
