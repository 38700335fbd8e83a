"""A certificate for a user's own training: what changes its weights that should not, and why."""
