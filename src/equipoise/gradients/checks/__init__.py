"""What is checked before an engine is used: rows against plain autograd, records that mix, buffers, BatchNorm."""
