"""Schedulers, one per file."""
