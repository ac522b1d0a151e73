"""Recordings of draft and target, their replay, and what is measured on them."""
