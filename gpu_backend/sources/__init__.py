"""Where models come from: a path, the cache, a hub, or packages of a Python index."""
