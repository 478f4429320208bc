"""A Hub on this machine: enough of the real one's HTTP interface for huggingface_hub itself, unpatched.

Models only: info, tree (in pages), refs, resolve with ETag and ranges (large files redirect to a 'CDN' under another host
name, where no token may arrive), preupload, the LFS batch protocol, commits, branches, pull requests, YAML validation.
Storage is memory. Every request is logged, and a `Fault` makes the next matching ones go wrong. Large files travel by LFS when
HF_HUB_DISABLE_XET is set, and by Xet when it is not.
"""

from tests.hub.local_hub.plumbing import Fault, Request
from tests.hub.local_hub.repositories import Repository, Stored
from tests.hub.local_hub.server import LocalHub

__all__ = ["Fault", "LocalHub", "Repository", "Request", "Stored"]
