"""Damage on purpose, by the million: what every reader does with input that nobody would write.

    python -m fuzz headers      --cases 1000000 --seed 1     shard headers, against the safetensors library
    python -m fuzz texts        --cases 200000 --seed 1      index, config.json, recipe, receipts, journal
    python -m fuzz tokenizers   --cases 10000 --seed 1       tokenizer files and chat template, loaded as calibration does
    python -m fuzz checkpoints  --cases 20000 --seed 1       whole small checkpoints: plan, convert, verify
    python -m fuzz coverage headers --seconds 600            coverage-guided (pip install atheris; Python 3.11)

A case is right if it ends, within a bound of time and memory, in a right result or in one of moepress's own errors. A
traceback of another kind, a hang, an allocation of what the file does not hold, and a wrong result that ``verify``
passes are findings: the run goes on, prints each kind once with the case that shows it, and exits 1.

Case n of seed s depends on (s, n) alone: ``--only n`` runs it by itself. Every finding became a named test
(tests/formats/test_fuzz.py, tests/calibration/test_damaged_tokenizers.py, tests/faults/); the short runs of the test suite
use the same generators.

    wild          values and edits that break JSON documents and bytes
    bounded       one case within its time and memory
    headers, texts, tokenizers, checkpoints      the campaigns: what is damaged, and who judges
    small         the smallest checkpoints that have every kind of part, as files in memory
    damage        what can happen to such a checkpoint
    expectation   what must come out of it, computed without moepress
"""
