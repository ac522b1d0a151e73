"""Gates, one per file."""
