"""Stand-in, see the package's docstring."""

from torchvision.absent import lookup
from torchvision.transforms.v2 import functional  # noqa: F401 - before __getattr__, which would answer for it

__getattr__ = lookup(__name__)
