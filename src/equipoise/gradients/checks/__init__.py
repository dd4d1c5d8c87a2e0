"""What is checked before an engine is used: rows against autograd, records that mix, buffers."""
