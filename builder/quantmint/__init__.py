"""Quantmint: a release builder for quantized LLMs that can be trusted."""

__version__ = "0.1.0"
