"""Stand-in, see the package's docstring."""

from torchvision.absent import lookup

__getattr__ = lookup(__name__)
