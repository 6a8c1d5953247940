"""Which ids a rank owns, and the only collective calls."""
