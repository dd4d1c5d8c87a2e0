"""Data as the experiments want them: long-tailed selections, and a lossless packing of CIFAR-10."""
