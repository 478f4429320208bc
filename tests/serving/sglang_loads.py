"""Load checkpoints with SGLang's own ModelRunner, one after the other. Runs in the SGLang environment, not in ours.

    python sglang_loads.py jobs.json      jobs: [{"model": folder, "flags": [...], "report": folder, "log": file}]

Importing SGLang takes longer than loading a tiny model, so it is imported once and each job is a fork. What happens to
a job is what happens in a server's scheduler process: arguments resolved, model built, weights loaded and
post-processed, KV pool allocated, attention set up. With prompts, it also runs them as one batch, feeding given tokens:

    {"prompts": [[1, 2, 3]], "forced": [[7, 8]]}  ->  logits of the last prompt token and after 7

Writes one JSON line a job: {"model", "error", "model_class", "logprobs": [prompt][step] -> [vocabulary]}.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from array import array
from pathlib import Path

FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--skip-tokenizer-init"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--max-total-tokens", "4000"),
)


def load(job: dict) -> dict:
    """Load one checkpoint in this process, which is good for nothing else afterwards."""
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = ServerArgs.from_cli_args(parser.parse_args(["--model-path", job["model"], *FLAGS, *job["flags"]]))
    arguments.resolve_once()
    ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_args, **_kwargs: None
    runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    found = {
        "model_class": type(runner.torch_runner.model if hasattr(runner, "torch_runner") else runner.model).__name__
    }
    if not job.get("prompts"):
        return found

    requests = []
    for number, prompt in enumerate(job["prompts"]):
        sampling = one_batch.SamplingParams(temperature=0, max_new_tokens=len(job["forced"][0]) + 1)
        request = one_batch.Req(
            rid=number, origin_input_text="", origin_input_ids=array("q", prompt), sampling_params=sampling
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len, request.extend_end = -1, len(prompt)
        requests.append(request)
    _, logits, batch = runner.extend(requests)
    steps = [torch.log_softmax(logits.float(), -1)]
    for tokens in zip(*job["forced"], strict=True):
        _, logits = runner.decode(torch.tensor(tokens), batch)
        steps.append(torch.log_softmax(logits.float(), -1))
    return found | {"logprobs": torch.stack(steps, 1).tolist()}


def main() -> None:
    from sglang.srt.plugins import load_plugins

    os.environ.setdefault("MOEPRESS_LOAD_REPORT", "unused")  # so that the recorder is there; each job names its own
    load_plugins()
    import moepress_load_recorder
    import sglang.benchmark.one_batch
    import sglang.srt.models.deepseek_v2
    import sglang.srt.models.glm4_moe
    import sglang.srt.models.qwen3_moe  # noqa: F401

    for job in json.loads(Path(sys.argv[1]).read_text()):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
            os.environ[moepress_load_recorder.VARIABLE] = job["report"]
            try:
                result = {"error": None} | load(job)
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
