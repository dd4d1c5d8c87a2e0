"""What is checked before an engine is used: rows against autograd, and records that mix."""
