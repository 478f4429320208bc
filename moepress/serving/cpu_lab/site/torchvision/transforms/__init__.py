"""Stand-in, see the package's docstring. The interpolation modes are read when transformers is imported."""

from enum import Enum

from torchvision.absent import lookup
from torchvision.transforms import functional, v2  # noqa: F401 - before __getattr__, which would answer for them

__getattr__ = lookup(__name__)


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
