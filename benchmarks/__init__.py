"""Speed comparisons: swath beside its peer, a hand-written loop, gymnasium and the env alone."""
