"""Bridges to the loops of other libraries; each module needs the package that it names."""
