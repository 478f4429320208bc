"""The server that the files are made for, as a process: launch command, boot, log, what it loaded, and a clean end.

    launch       the command line, from the runtime contract and the recipe
    sglang       a server in an environment of the user's choice, from start to readiness
    keeper       the process tree ends with us, however we end
    server_log, death, client    what it says, why it died, what it answers
    serve        which processes serve a checkpoint, and their commands: one server, or prefill, decode and router
    disaggregation   what prefill and decode must share, and what the server refuses
    running      such processes, started, ready and ended together
    load_proof   every tensor of ours accounted for: asked for, loaded, equal
    cpu_lab      kernels in plain torch, so that the real SGLang 0.5.23 runs without a GPU; for tests only

SGLang's pins conflict with ours: it lives in an environment of its own and is only ever run, never imported.
"""
