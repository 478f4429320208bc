"""Stand-in for sgl_kernel: every name can be imported, none can be called.

SGLang imports its CUDA kernels by name at module level, even for kernels that a CPU never reaches. Here each name is a
function that says which kernel was wanted. Submodules do not exist, so `sgl_kernel.scalar_type` and the like raise
ImportError, which SGLang takes as "not there".
"""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not in moepress's CPU lab")

    missing.__name__ = missing.__qualname__ = name
    return missing
