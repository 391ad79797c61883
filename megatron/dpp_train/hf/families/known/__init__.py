"""The families of this package: each module holds one or several :class:`Family`."""
