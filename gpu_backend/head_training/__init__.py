"""Training an EAGLE-3 head from what its target says of its own accord."""
