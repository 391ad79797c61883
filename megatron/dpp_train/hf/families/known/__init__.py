"""The families of this package: each module is one, and holds a :class:`Family` as ``FAMILY``."""
