"""A module-level ``__getattr__`` whose names can be imported, subclassed and compared, but not called."""


def lookup(module):
    """Return the ``__getattr__`` for `module`; the same name is always the same object."""

    def refuse(self, *args, **kwargs):
        raise NotImplementedError(f"{module}.{type(self).__name__}: moepress's CPU lab serves text models only")

    made = {}

    def getattr_(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return made.setdefault(name, type(name, (), {"__init__": refuse, "__module__": module}))

    return getattr_
