"""Stand-in for torchvision, for text models only.

SGLang imports the image code of all its models, and that imports torchvision. The real one must match torch to the
patch version and brings nothing that a text model needs. Here every name can be imported; whoever calls one is told.
"""

from torchvision import io, transforms  # noqa: F401 - before __getattr__, which would answer for them
from torchvision.absent import lookup

__version__ = "0.0.0"
__getattr__ = lookup(__name__)
