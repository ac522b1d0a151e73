"""Speculative-decoding policies: torch tensors in, torch tensors out."""
