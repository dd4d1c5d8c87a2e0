"""equipoise: differentially private training without clipping bias, on PyTorch."""

__version__ = "0.1.0"
