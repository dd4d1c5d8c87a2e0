"""Methods that project gradients on a subspace: PCDP-SGD, PDP-SGD, GEP, random projection."""
