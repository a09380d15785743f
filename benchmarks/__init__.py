"""Scripts that measure; a package, so that no other package of that name can stand in for it."""
