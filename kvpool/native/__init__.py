"""Everything compiled: Cython over the C core in ``csrc/``. ``kvpool.reference`` has the same names in Python."""
