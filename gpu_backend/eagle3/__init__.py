"""EAGLE-3 heads (Li et al., arXiv 2503.01840): one layer that drafts from target features."""
