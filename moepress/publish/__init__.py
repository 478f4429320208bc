"""From a verified output to a repository on the Hub whose card says what pressing cost.

    gate        may this folder be published? receipts for every shard, a verification of just these bytes
    contents    exactly which files, with the checksums they must have there
    metadata    the card's YAML: from facts and from the source's own card, checked before anything is sent
    card        the text of the card
    push        a pull request, compared with the checksums, and only then main

What is published is what `convert` finished, and two files of ours beside it: the card (README.md) and the receipts, all
in one (moepress_receipts.json.gz): how every weight was decided, its error, and the digest of the source bytes it was made
from. Plans, logs, results and ledgers under ``.moepress`` stay at home: they name this machine's folders.
"""
