"""The Hub: look at a checkpoint without downloading it, fetch it so that every byte is known, press it as it lands.

    address.py     org/name[@revision]  ->  Address
    connection.py  one client for every request: waits out rate limits, retries what may be retried, explains refusals
    listing.py     Address  ->  Snapshot: one commit, its files, sizes and checksums
    reading.py     byte ranges of a snapshot's files: all that `inspect` and `plan` need
    opening.py     SRC of a command: a folder, or a repository
    pulling.py     a snapshot into a folder, file by file, each checked before it gets its name
    ledger.py      what a pulled folder holds, and of which commit
    arriving.py    shards that arrive while others are pressed, and leave when nobody needs them any more

Everything after the first request speaks of one commit, never of a branch. No token is ever printed or written.
"""
